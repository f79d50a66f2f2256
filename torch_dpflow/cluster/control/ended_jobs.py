"""Record of jobs that have left their flow: what they read, how long they waited, and what limited them last. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import msgspec

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.cluster.control.autoscale import JobCounts
from torch_dpflow.cluster.messages.coordinator import MAX_ENDED, EndedJob

#: A job that waits less than this share of its time is limited by its training, whatever limits its flow.
LITTLE_STALL = 0.05


class EndedJobs:
    """The latest jobs that have ended, at most `MAX_ENDED`. A job that returns under its name is removed.

    Args:
        packed: what `packed` returned before, in another process; empty at first.
    """

    def __init__(self, packed: bytes = b"") -> None:
        #: By flow and job, the one that ended last at the end.
        self._ended: dict[tuple[str, str], EndedJob] = {}
        #: By flow, the counts of its jobs when they were last seen, and the limit that was known last.
        self._seen: dict[str, tuple[Mapping[str, JobCounts], str]] = {}
        self._has_changed = False
        with suppress(msgspec.MsgspecError):  # of another release: it is for display only
            self._ended |= {(one.flow, one.job): one for one in msgpack_decoder(list[EndedJob]).decode(packed)}

    @property
    def views(self) -> list[EndedJob]:
        """The jobs, the one that ended last at the end."""
        return list(self._ended.values())

    def observe(self, flow: str, readings: Mapping[str, JobCounts], limited_by: str, at: float) -> None:
        """Record the counts of a flow's jobs. Jobs that were recorded before and are missing now have ended.

        limited_by: the flow's limit before these counts. at: the time, seconds since 1970.
        """
        before, known = self._seen.get(flow, ({}, ""))
        limit = limited_by or known
        for job in before.keys() - readings.keys():
            counts = before[job]
            if counts.samples:
                by = "job" if counts.stall_s <= LITTLE_STALL * counts.reading_s else limit
                self._ended.pop((flow, job), None)
                self._ended[flow, job] = EndedJob(
                    flow, job, int(at), counts.samples, counts.stall_s, counts.reading_s, by
                )
                self._has_changed = True
        for job in readings:
            self._has_changed |= self._ended.pop((flow, job), None) is not None
        self._seen[flow] = readings, limit
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def forget(self, flow: str, at: float) -> None:
        """Record that a flow's services have ended, and its jobs with them."""
        self.observe(flow, {}, "", at)
        del self._seen[flow]

    def take_packed(self) -> bytes | None:
        """Return the record as bytes to store; None if nothing has changed since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return msgspec.msgpack.encode(self.views) if has_changed else None
