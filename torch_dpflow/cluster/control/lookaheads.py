"""Lookaheads: a job's future reads as its router knows them, and as a shard uses them (thesis 3.4.3, 3.4.4).

Pure: there is no socket, thread or clock inside. The router takes each job's future reads from its sampling group, or
from the job itself, and sends each shard the reads of its keys. The router does not know which drawn samples the job
has already requested from the shard; `ShardLookaheads` removes these from the lookahead for the cache's policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_dpflow.cluster.messages.router import JobLookahead, LookaheadRequest
from torch_dpflow.lookahead import Keys, Lookahead, Weights
from torch_dpflow.samplers.indices import IndexArray, compact

#: In a flow of up to `MAX_WHOLE` samples, a lookahead contains all future reads of a job. In a larger flow, it contains
#: the job's next samples: `FIRST_HORIZON` when an epoch begins, twice the number in each further lookahead, at most
#: `HORIZON`. Larger first lookaheads would delay the first batches.
MAX_WHOLE, HORIZON, FIRST_HORIZON = 1 << 22, 1 << 20, 1 << 17
#: If a lookahead has more certain samples than this, the next one is requested when half of them have been requested.
_MANY_CERTAIN = 1 << 16


@dataclass(frozen=True, slots=True)
class KnownEpoch:
    """Reads of a job in its epoch, as the router knows them.

    Args:
        ahead: future reads, from the job's sampling group or its own sampler.
        drawn: samples that were drawn since the epoch began at this router, in order; in a large flow, the last ones.
        done: samples that the job had read before the epoch began at this router, ascending; empty in a large flow.
    """

    ahead: Lookahead
    drawn: Keys
    done: Keys

    def cut(self, first: int, end: int, size: int) -> tuple[JobLookahead, list[Any]]:
        """Return (`JobLookahead`, its five arrays) for a shard that owns the keys from `first` to before `end`.

        size: number of samples of the flow. The caller sets the version and weight of the `JobLookahead`.
        """
        ahead, dtype = self.ahead, compact(size)
        certain = _within(np.concatenate([self.drawn, ahead.certain]), first, end)
        members = None if ahead.members is None else _within(ahead.members, first, end)
        if members is not None and len(members) == end - first:
            members = None
        length = end - first if members is None else len(members)
        if not ahead.complete and len(self.done):
            members = np.setdiff1d(np.arange(first, end) if members is None else members, self.done)
        is_likely = (ahead.likely >= first) & (ahead.likely < end)
        answer = JobLookahead(ahead.epoch, 0, ahead.complete, length, members is not None, ahead.following is not None)
        empty = np.empty(0, dtype)
        arrays: list[npt.NDArray[Any]] = [
            certain.astype(dtype),
            ahead.likely[is_likely].astype(dtype),
            ahead.weights[is_likely].astype(np.float64) if len(ahead.weights) else np.empty(0, np.float64),
            empty if members is None else members.astype(dtype),
            empty if ahead.following is None else _within(ahead.following, first, end).astype(dtype),
        ]
        return answer, arrays


def joint_order(parts: dict[int, IndexArray], replicas: int) -> IndexArray:
    """Return the order of a job whose `replicas` ranks read alternately. parts: the known orders of ranks, by rank."""
    if replicas == 1:
        return parts[0]
    places = np.concatenate([np.arange(len(part)) * replicas + rank for rank, part in parts.items()])
    joint: IndexArray = np.concatenate(list(parts.values()))[np.argsort(places)]
    return joint


def _within(keys: Keys, first: int, end: int) -> Keys:
    return keys[(keys >= first) & (keys < end)]


#: Lookahead requests per epoch: for a job whose order is known to its end, which others that join may change; for
#: other jobs.
_REQUESTS_FIXED, _REQUESTS = 8, 32


class LookaheadParts(NamedTuple):
    """Arrays of a lookahead, as in the frames of a router's answer: see `JobLookahead`."""

    certain: Keys
    likely: Keys
    weights: Weights
    members: Keys
    following: Keys

    @classmethod
    def of(cls, frames: Sequence[memoryview], size: int) -> LookaheadParts | None:
        """Return copies of the arrays in an answer's frames; None without frames. size: the flow's sample count."""
        if not frames:
            return None
        dtypes = [compact(size), compact(size), np.float64, compact(size), compact(size)]
        arrays: list[Any] = [np.array(np.frombuffer(frame, dtype)) for frame, dtype in zip(frames, dtypes, strict=True)]
        return cls(*arrays)


class _Marks:
    """Set of keys from `first` to before `end`, as one bit for each key."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._length = first, end - first
        self._bits = bytearray(-(-self._length // 8))
        #: Number of keys in the set.
        self.count = 0

    def add(self, keys: Sequence[int]) -> None:
        """Add these keys. Keys outside the range are ignored."""
        first, length, bits, added = self._first, self._length, self._bits, 0
        for key in keys:
            place = key - first
            if 0 <= place < length:
                byte, bit = place >> 3, 1 << (place & 7)
                if not bits[byte] & bit:
                    bits[byte] |= bit
                    added += 1
        self.count += added

    def has(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return for each of these keys, which must be in the range, whether it is in the set."""
        places = keys - self._first
        found: npt.NDArray[np.bool_] = (np.frombuffer(self._bits, np.uint8)[places >> 3] >> (places & 7)) & 1 > 0
        return found


@dataclass(slots=True, eq=False)
class _JobEpoch:
    """State of a job's epoch at this shard."""

    #: The shard's keys that the job has requested in this epoch.
    wanted: _Marks
    epoch: int = -1
    #: The epoch of each of its readers.
    epochs: dict[str, int] = field(default_factory=dict)
    #: The version of the latest lookahead of this epoch; 0 before the first.
    version: int = 0
    #: How many samples the job requests before the next lookahead is requested.
    left: int = 0
    #: How many of its next samples the next lookahead has, in a flow of many samples.
    horizon: int = FIRST_HORIZON
    is_requested: bool = False


class ShardLookaheads:
    """State machine that decides when a shard requests its jobs' lookaheads from the router. Not thread-safe.

    Args:
        flow: the name and version of the flow.
        size: number of samples of the flow; the shard owns all of them until `assign`.
    """

    def __init__(self, flow: str, size: int) -> None:
        self._flow = flow
        self._first, self._end = 0, size
        self._jobs: dict[str, _JobEpoch] = {}
        self._due: list[str] = []

    def assign(self, first: int, end: int) -> None:
        """Set the keys that the shard owns. If there are any, `requests` then returns requests for all jobs."""
        self._first, self._end = first, end
        for name, job in self._jobs.items():
            job.wanted = _Marks(first, end)
            job.version = 0
            self._request(name, job)

    def wanted(self, reader: str, name: str, epoch: int, keys: Sequence[int]) -> bool:
        """Record that a reader of the job `name` requests these keys.

        Returns False if another rank of the job is in a later epoch: the policy must not count these reads.
        """
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = _JobEpoch(_Marks(self._first, self._end))
        if job.epochs.get(reader) != epoch:
            job.epochs[reader] = epoch
            latest = max(job.epochs.values())
            if latest != job.epoch:
                job.epoch, job.version, job.horizon = latest, 0, FIRST_HORIZON
                job.wanted = _Marks(self._first, self._end)
                self._request(name, job)
        if epoch != job.epoch:
            return False
        job.wanted.add(keys)
        job.left -= len(keys)
        if job.left <= 0 and job.version:
            self._request(name, job)
        return True

    def leave(self, reader: str, name: str) -> None:
        """Remove a reader; with the last reader of a job, remove the job too."""
        job = self._jobs.get(name)
        if job is not None:
            job.epochs.pop(reader, None)
            if not job.epochs:
                del self._jobs[name]

    @property
    def is_due(self) -> bool:
        """Whether any lookahead should be requested from the router now."""
        return bool(self._due)

    def requests(self) -> list[LookaheadRequest]:
        due, self._due = self._due, []
        requests: list[LookaheadRequest] = []
        for name in due:
            job = self._jobs.get(name)
            if job is not None:
                job.is_requested = False
            if job is not None and self._first < self._end:  # without keys, the shard drains
                request = LookaheadRequest(self._flow, name, self._first, self._end, job.version, job.horizon)
                requests.append(request)
        return requests

    def failed(self, requests: Sequence[LookaheadRequest]) -> None:
        """Record that these requests have failed. `requests` then returns requests for the same jobs again."""
        for request in requests:
            if (job := self._jobs.get(request.job)) is not None:
                self._request(request.job, job)

    def answered(
        self, request: LookaheadRequest, answer: JobLookahead, parts: LookaheadParts | None
    ) -> Lookahead | None:
        """Return the lookahead in a router's answer, for the policy; None if the answer is not new or no longer fits.

        It no longer fits if the job has left or is in another epoch, or if the shard owns other keys.
        """
        job = self._jobs.get(request.job)
        if job is None or (request.first, request.end) != (self._first, self._end):
            return None
        # Even without an answer of use: the next request follows after as many samples.
        job.left = max(1, (self._end - self._first) // (_REQUESTS_FIXED if answer.is_complete else _REQUESTS))
        if parts is None or answer.epoch != job.epoch or answer.version == job.version:
            return None
        job.version, job.horizon = answer.version, min(HORIZON, 2 * job.horizon)
        certain = parts.certain[~job.wanted.has(parts.certain)]
        if not answer.is_complete and len(certain) > _MANY_CERTAIN:
            job.left = min(job.left, len(certain) // 2)
        return self._lookahead(job, answer, parts, certain)

    def _lookahead(self, job: _JobEpoch, answer: JobLookahead, parts: LookaheadParts, certain: Keys) -> Lookahead:
        """Convert an answer to a policy's lookahead. certain: the samples that are not requested yet."""
        weights, keys = parts.weights, self._end - self._first
        reads: Keys | None = parts.members
        if not answer.has_members:
            reads = np.arange(self._first, self._end) if keys <= MAX_WHOLE else None
        if answer.is_complete:
            # Samples may occur twice: an order of a sampler with replacement, the padding of an uneven end.
            length = max(answer.length, len(parts.certain)) if keys <= MAX_WHOLE else keys
            return Lookahead(
                epoch=job.epoch,
                length=length,
                position=length - len(certain),
                certain=certain,
                members=reads,
                following=parts.following if answer.has_following else None,
            )
        is_likely = ~job.wanted.has(parts.likely)
        return Lookahead(
            epoch=job.epoch,
            length=keys if reads is None else len(reads),
            position=job.wanted.count if reads is None else int(np.count_nonzero(job.wanted.has(reads))),
            certain=certain,
            likely=parts.likely[is_likely],
            weights=weights[is_likely] if len(weights) else weights,
            members=reads,
        )

    def _request(self, name: str, job: _JobEpoch) -> None:
        if not job.is_requested:
            job.is_requested = True
            self._due.append(name)
