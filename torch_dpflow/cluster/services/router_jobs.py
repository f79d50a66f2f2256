"""The jobs of a router, and whether a process that joins one describes it as the others do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from torch_dpflow.cluster.control.joint_order import JointOrder
from torch_dpflow.cluster.messages.router import JobRank, Join
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import NameBusyError, OverloadedError
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result
from torch_dpflow.ipc.rpc.call_service import Handler
from torch_dpflow.ipc.rpc.leases import LEAVING_S
from torch_dpflow.samplers.indices import IndexArray
from torch_dpflow.samplers.passes import RankShares


@dataclass(frozen=True)
class Reader:
    """A process that reads: a job, or a rank of a job."""

    job: str
    rank: int


@dataclass
class FlowJob:
    """A job with all of its ranks."""

    order: JointOrder
    shares: RankShares
    seed: int
    #: Samples of the job; None for all.
    indices: IndexArray | None
    weight: float
    #: For a job with its own sampler: the newest epoch, and its order by rank.
    announced_epoch: int = 0
    announced: dict[int, IndexArray] = field(default_factory=dict)
    #: State of the current version of its lookahead.
    known: tuple[Any, ...] = ()
    version: int = 0
    #: When processes first described the job differently, by their random numbers.
    rivals: dict[int, float] = field(default_factory=dict)

    def check(self, join: Join, rank: JobRank, indices: IndexArray | None, *, renewed: float, now: float) -> None:
        """Check that a rank describes the job as its other ranks do.

        The others may be those of an earlier run that was killed, and that this one continues at another size. Then
        they renew no lease `LEAVING_S` after the first request.

        Args:
            renewed: when one of the other ranks renewed its lease last.

        Raises:
            NameBusyError: it does not, and the others may have ended; try again.
            UsageError: it does not, and the others are running.
        """
        problem = next(self._differences(join, rank, indices), None)
        if problem is None:
            return
        if renewed > self.rivals.setdefault(join.holder, now) + LEAVING_S:
            del self.rivals[join.holder]
            raise UsageError(problem)
        raise NameBusyError(
            f"{problem}. The other ranks last renewed a lease {now - renewed:.1f} s ago; if they have ended, the name "
            "is free once their leases have expired"
        )

    def _differences(self, join: Join, rank: JobRank, indices: IndexArray | None) -> Iterator[str]:
        mine = (self.shares.replicas, self.shares.drop_last, self.seed)
        theirs = (rank.replicas, rank.drop_last, join.seed)
        for name, here, there in zip(("num_replicas", "drop_last", "seed"), mine, theirs):
            if here != there:
                yield (
                    f"rank {rank.rank} of job {rank.job!r} joins with {name}={there!r}, other ranks have {here!r}; "
                    "all must have the same, and another job another name"
                )
        if not np.array_equal(_as_set(self.indices), _as_set(indices)):
            yield f"rank {rank.rank} of job {rank.job!r} joins with other samples than its other ranks"


class Restoring:
    """Restores the orders of jobs that resume in a thread, which takes seconds for many samples.

    Meanwhile the server's thread answers heartbeats, and no other call that uses the sampling group.

    Args:
        post: of the server.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self.is_running = False

    def alone(self, handler: Handler) -> Handler:
        """Return a handler that refuses calls while an order is restored; their callers repeat them."""

        def handle(call: IncomingCall) -> Result | Later | None:
            if self.is_running:
                raise OverloadedError("the router restores the order of a job that resumes; the call is repeated")
            return handler(call)

        return handle

    def run(self, call: IncomingCall, restore: Callable[[], None]) -> Later:
        """Restore an order in a thread, and then answer the call."""
        self.is_running = True
        threading.Thread(target=self._run, args=(call, restore), name="dpflow-restore", daemon=True).start()
        return LATER

    def _run(self, call: IncomingCall, restore: Callable[[], None]) -> None:
        answer = call.answer
        try:
            restore()
        except Exception as error:
            answer = partial(call.fail, error)

        def finish() -> None:
            self.is_running = False
            answer()

        self._post(finish)


def _as_set(indices: IndexArray | None) -> IndexArray:
    return np.empty(0, np.int64) if indices is None else np.sort(indices)
