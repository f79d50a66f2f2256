"""Jobs of a router, and checks that all processes of a job describe it in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from torch_dpflow.cluster.control.joint_order import JointOrder
from torch_dpflow.cluster.control.reader_names import Rivals
from torch_dpflow.cluster.messages.router import JobFigures, JobRank, Join
from torch_dpflow.cluster.services.service import run_apart
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import UNNAMED, OverloadedError
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result
from torch_dpflow.ipc.rpc.call_service import Handler
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import IndexArray
from torch_dpflow.samplers.passes import RankShares

_NOTHING: IndexArray = np.empty(0, np.int64)


@dataclass
class Reader:
    """Process that reads from the flow: a job, or one rank of a job."""

    job: str
    rank: int
    #: The latest counts that the reader has sent by heartbeat; None: it has sent none.
    figures: JobFigures | None = None
    #: Whether the process is between two epochs.
    rests: bool = False


@dataclass
class FlowJob:
    """Record of one job. The router keeps it while the job has readers."""

    order: JointOrder
    shares: RankShares
    seed: int
    #: `set_digest` of the job's samples.
    members: bytes
    weight: float
    #: For a job with its own sampler: its newest epoch, and each rank's order of samples in this epoch.
    announced_epoch: int = 0
    announced: dict[int, IndexArray] = field(default_factory=dict)
    #: What the current version of the job's lookahead depends on: a new version begins when this changes.
    known: tuple[Any, ...] = ()
    version: int = 0
    #: Processes that described the job differently.
    rivals: Rivals = field(default_factory=Rivals)

    def check(self, join: Join, rank: JobRank, members: bytes, *, renewed: float, now: float) -> None:
        """Check that a joining rank describes the job as the other ranks do.

        Where they differ, the other ranks may be the remains of an earlier run that was killed. They count as running
        if one of them renews its lease more than `reader_names.LEAVING_S` seconds after the first refused request.

        Args:
            join: the rank's request. rank: its rank and number of ranks. members: `set_digest` of its job's samples.
            renewed: time of the latest renewal of any other rank's lease. now: the present time (seconds).

        Raises:
            NameBusyError: the descriptions differ, and the other ranks may have ended; the caller repeats the request.
            UsageError: the descriptions differ, and the other ranks are running.
        """
        problem = next(self._differences(join, rank, members), None)
        if problem is None:
            return
        busy = (
            f"{problem}. The other ranks last renewed a lease {now - renewed:.1f} s ago; if they have ended, the name "
            "is free once their leases have expired"
        )
        self.rivals.refuse(join.holder, renewed, now, busy=busy, final=problem)

    def _differences(self, join: Join, rank: JobRank, members: bytes) -> Iterator[str]:
        mine = (self.shares.replicas, self.shares.drop_last, self.seed)
        theirs = (rank.replicas, rank.drop_last, join.seed)
        for name, here, there in zip(("num_replicas", "drop_last", "seed"), mine, theirs):
            if here != there:
                yield (
                    f"rank {rank.rank} of job {rank.job!r} joins with {name}={there!r}, other ranks have {here!r}; "
                    "all must have the same, and another job another name"
                )
        if members != self.members:
            yield f"rank {rank.rank} of job {rank.job!r} joins with samples that differ from its other ranks'"


#: Function that completes a call in the server's thread, and returns the result that answers the call.
Finish: TypeAlias = Callable[[], Result | Later | None]


class Restoring:
    """Thread for calls that pass over all samples, which takes seconds in a large flow.

    Such calls restore the order of a job that resumes, or add a job that reads a part of the samples. Meanwhile the
    server's thread answers heartbeats, but refuses calls that use the sampling group.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self.is_running = False

    def alone(self, handler: Handler) -> Handler:
        """Return a handler that calls `handler`, but refuses calls while the thread runs; clients then repeat them."""

        def handle(call: IncomingCall) -> Result | Later | None:
            if self.is_running:
                raise OverloadedError("the router restores the order of a job, or adds one; the call is repeated")
            return handler(call)

        return handle

    def run(self, call: IncomingCall, work: Callable[[], Finish]) -> Later:
        """Run `work` in a new thread, and then, in the server's thread, the function that it returns. Return LATER.

        The second function's result answers the call; an error of either function fails it.
        """
        self.is_running = True
        run_apart(self._post, "dpflow-restore", work, partial(self._answer, call))
        return LATER

    def _answer(self, call: IncomingCall, outcome: Future[Finish]) -> None:
        self.is_running = False
        try:
            answer = outcome.result()()
        except Exception as error:
            call.fail(error)
        else:
            if answer is not LATER:
                call.answer(*(answer or ()))


def new_job(group: SamplingGroup, join: Join, rank: JobRank, indices: IndexArray | None, members: bytes) -> FlowJob:
    """Add a job to a sampling group, and return its record, when its first rank joins.

    indices: the job's samples; None: all. members: `set_digest` of `indices`.
    """
    batch = join.batch_size * rank.replicas
    named = not rank.job.startswith(UNNAMED)
    group.join(rank.job, indices, seed=join.seed, batch_size=batch, independence=join.independence, named=named)
    shares = RankShares(group.size if indices is None else len(indices), rank.replicas, rank.drop_last)
    return FlowJob(JointOrder(group, rank.job, shares), shares, join.seed, members, join.weight)


def indices_in(frames: list[memoryview]) -> IndexArray:
    """Return the sample numbers in the frames of a `Join`. Raises UsageError if the frames are invalid."""
    if len(frames) != 1 or frames[0].nbytes % 8:
        raise UsageError("a job's samples are one frame of int64")
    return np.frombuffer(frames[0], np.int64)


def samples_in(bitmap: memoryview, size: int) -> IndexArray:
    """Return the numbers of samples whose bits are set; none if `bitmap` is empty. Raises UsageError for a bad size."""
    bits = np.frombuffer(bitmap, np.uint8)
    if len(bits) not in (0, -(-size // 8)):
        raise UsageError(f"a bitmap of {len(bits)} bytes: {-(-size // 8)} are required")
    if not bits.any():
        return _NOTHING
    return np.flatnonzero(np.unpackbits(bits, count=size))


def set_digest(indices: IndexArray | None) -> bytes:
    """Return a digest of a set of samples, given in any order; empty for None, which is all samples."""
    return b"" if indices is None else hashlib.blake2b(np.sort(indices).data, digest_size=16).digest()
