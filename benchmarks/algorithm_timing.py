"""What the algorithms benchmark times: draws of sampling groups, accesses of cache policies, their memory."""

import gc
import heapq
import multiprocessing
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import psutil
import torch  # noqa: F401  # strategies import it with their first permutation, which is not to be measured
from numpy.typing import NDArray

from benchmarks.simulation.contestants import make_group, make_policy
from torch_dpflow.caches.policy import Policy
from torch_dpflow.cluster.control.joint_order import Held, JointOrder
from torch_dpflow.cluster.control.lookaheads import KnownEpoch, LookaheadParts, ShardLookaheads
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.passes import RankShares

#: indices planned by one draw, and keys passed by one access in bulk
BATCH = 2048
#: share of the data set that caches and directories hold
CAPACITY = 0.2
#: a measurement stops at this age even if the epoch is not over, in seconds
LIMIT = 3.0

#: CPU seconds of all threads of this process: what is timed never waits, so on a quiet machine they are the
#: seconds that pass, and on a busy one they leave out those of others
clock = time.process_time


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What the jobs of one measurement read, and how fast."""

    samples: int
    #: one set for each job; None: every sample
    sets: Sequence[NDArray[np.int64] | None]
    #: one for each job
    speeds: Sequence[float]
    label: str = "equal"

    @classmethod
    def equal(cls, samples: int, jobs: int) -> "Jobs":
        return cls(samples=samples, sets=[None] * jobs, speeds=[1.0] * jobs)

    @classmethod
    def eight_speeds(cls, samples: int) -> "Jobs":
        speeds = [1 - k / 10 for k in range(8)]
        return cls(samples=samples, sets=[None] * 8, speeds=speeds, label="eight speeds")

    @classmethod
    def overlapping(cls, samples: int) -> "Jobs":
        """Seven jobs on half of the data set each, every next one shifted by a twelfth."""
        half, shift = samples // 2, samples // 12
        sets = [np.arange(k * shift, k * shift + half, dtype=np.int64) for k in range(7)]
        return cls(samples=samples, sets=sets, speeds=[1.0] * 7, label="partly overlapping")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """CPU seconds spent on a number of operations."""

    operations: int
    seconds: float
    #: other figures of the same run
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds


def draw_rate(sampler: str, jobs: Jobs, *, batch: int = BATCH, limit: float = LIMIT) -> Timed:
    """Draw one epoch of every job, interleaved by speed; time spent in `draw` and nowhere else.

    `extra`: "join_s" the longest insertion of a set, "epoch_start_s" the longest start of an epoch.
    """
    group = make_group(sampler, jobs.samples, capacity=max(1, int(CAPACITY * jobs.samples)), seed=0)
    joins, starts = _enter(group, jobs, batch)
    due = [(0.0, k) for k in range(len(jobs.sets))]
    drawn, seconds = 0, 0.0
    while due and seconds < limit:
        now, job = heapq.heappop(due)
        begun = clock()
        taken = len(group.draw(str(job), batch, now).indices)
        seconds += clock() - begun
        drawn += taken
        if taken == batch:
            heapq.heappush(due, (now + batch / jobs.speeds[job], job))
    extra = {"join_s": max(joins), "epoch_start_s": max(starts)}
    return Timed(operations=drawn, seconds=seconds, extra=extra)


def access_rate(policy: str, samples: int, jobs: int, *, bulk: bool, limit: float = LIMIT) -> Timed:
    """Let jobs read their announced random orders through a full cache, a batch of each in turn.

    One by one: `access`, and `admit` after a miss. In bulk: `access_many`, and `admit_many` of the misses.
    """
    subject = make_policy(policy, max(1, int(CAPACITY * samples)), samples)
    orders = announce(subject, samples, jobs)
    _fill(subject, samples)
    step = _read_bulk if bulk else _read_singly
    done, seconds = 0, 0.0
    for first in range(0, samples, BATCH):
        for job, order in enumerate(orders):
            keys = order[first : first + BATCH]
            begun = clock()
            step(subject, keys, str(job))
            seconds += clock() - begun
            done += len(keys)
        if seconds >= limit:
            break
    return Timed(operations=done, seconds=seconds)


def announce(policy: Policy, samples: int, jobs: int) -> list[NDArray[np.int64]]:
    """Give every job a random order and tell the policy of it."""
    orders = [np.random.default_rng(job).permutation(samples) for job in range(jobs)]
    for job, order in enumerate(orders):
        policy.join(str(job))
        policy.hint(str(job), Lookahead.of_order(order, epoch=0))
    return orders


def group_memory(sampler: str, jobs: Jobs) -> float:
    """Bytes that a group holds for each sample of each job, half-way through an epoch or LIMIT into it."""
    read = sum(jobs.samples if members is None else len(members) for members in jobs.sets)
    return _held(partial(_busy_group, sampler, jobs)) / read


def policy_memory(policy: str, samples: int, jobs: int) -> float:
    """Bytes that a full policy holds for each sample of each job whose order it has been told."""
    return _held(partial(_full_policy, policy, samples, jobs)) / (samples * jobs)


def _busy_group(sampler: str, jobs: Jobs) -> SamplingGroup:
    group = make_group(sampler, jobs.samples, capacity=max(1, int(CAPACITY * jobs.samples)), seed=0)
    _enter(group, jobs, BATCH)
    begun = clock()
    for _ in range(jobs.samples // BATCH // 2):
        for job in range(len(jobs.sets)):
            group.draw(str(job), BATCH)
        if clock() - begun > LIMIT:
            break
    return group


def _full_policy(policy: str, samples: int, jobs: int) -> Policy:
    subject = make_policy(policy, max(1, int(CAPACITY * samples)), samples)
    announce(subject, samples, jobs)
    _fill(subject, samples)
    return subject


def _enter(group: SamplingGroup, jobs: Jobs, batch: int) -> tuple[list[float], list[float]]:
    """Join all jobs and start their epochs; the seconds that each took."""
    joins, starts = [], []
    for job, members in enumerate(jobs.sets):
        begun = clock()
        group.join(str(job), members, seed=job, batch_size=batch, speed=jobs.speeds[job])
        joins.append(clock() - begun)
    for job in range(len(jobs.sets)):
        begun = clock()
        group.start_epoch(str(job), 0)
        starts.append(clock() - begun)
    return joins, starts


def _fill(policy: Policy, samples: int) -> None:
    keys = np.arange(samples, dtype=np.int64)
    for first in range(0, int(CAPACITY * samples), BATCH):
        policy.admit_many(keys[first : first + BATCH])


def _read_bulk(policy: Policy, keys: NDArray[np.int64], job: str) -> None:
    held = policy.access_many(keys, job)
    policy.admit_many(keys[~held])


def _read_singly(policy: Policy, keys: NDArray[np.int64], job: str) -> None:
    access, admit = policy.access, policy.admit
    for key in keys.tolist():
        if not access(key, job):
            admit(key)


def _held(build: Callable[[], object]) -> int:
    """Bytes by which a process of its own grows when it keeps what `build` returns.

    The resident set, not Python's own count, because torch and numpy allocate past that.
    """
    # A forked child would inherit torch's thread pool without its threads.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure_growth, args=(build, sender))
    child.start()
    sender.close()
    try:
        return int(receiver.recv())
    finally:
        child.join()


def _measure_growth(build: Callable[[], object], sender: Connection) -> None:
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    kept = build()
    gc.collect()
    sender.send(process.memory_info().rss - before)
    del kept


def lookahead_cost(sampler: str, policy: str, samples: int, jobs: int) -> tuple[float, float]:
    """What the lookaheads of equal jobs cost at the start of an epoch, in a router and a shard together.

    Returns processor time, µs for each sample and job; and what is kept because of them, bytes for each.
    """
    group = make_group(sampler, samples, capacity=samples // 5, seed=0)
    kept = make_policy(policy, samples // 5, samples)
    shard = ShardLookaheads("flow:v1", samples)
    orders = []
    for job in range(jobs):
        group.join(str(job), seed=job, batch_size=BATCH)
        kept.join(str(job))
        order = JointOrder(group, str(job), RankShares(samples, 1, False))
        order.start(0, [Held(0)])
        orders.append(order)
    gc.collect()
    tracemalloc.start()
    try:
        started = time.process_time()
        for job, order in enumerate(orders):
            shard.wanted(str(job), str(job), 0, [])
            (request,) = shard.requests()
            known = KnownEpoch(group.lookahead(str(job)), order.drawn(), order.done)
            answer, arrays = known.cut(0, samples, samples)
            answer.version = 1
            frames = [memoryview(array.tobytes()) for array in arrays]
            lookahead = shard.answered(request, answer, LookaheadParts.of(frames, samples))
            assert lookahead is not None
            kept.hint(str(job), lookahead)
        elapsed = time.process_time() - started
        del known, answer, arrays, frames, lookahead
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return elapsed * 1e6 / samples / jobs, held / samples / jobs
