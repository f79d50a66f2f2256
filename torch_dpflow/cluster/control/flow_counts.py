"""What is counted of a flow and its jobs, and what has happened between two counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class JobCounts(msgspec.Struct, frozen=True):
    """What a job has read since it was opened: see `JobFigures`."""

    samples: int
    stall_s: float
    reading_s: float


class FlowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a flow: counts since any time, and what is so now."""

    #: The jobs that read, and what is known of them; of one that has just come nothing is.
    jobs: int
    readings: Mapping[str, JobCounts] = {}
    #: Samples that jobs have asked for, and loads that this caused or will cause.
    asked: int = 0
    due: int = 0
    #: Loads that have ended, seconds in which workers had tasks, and in which there were workers.
    loads: int = 0
    busy_s: float = 0.0
    worker_s: float = 0.0
    #: Of the seconds in which workers had tasks, those in which their results were on their way and they waited.
    away_s: float = 0.0
    #: Seconds in which jobs' requests waited for loads.
    late_s: float = 0.0
    #: Seconds in which samples were on their way from shards to jobs.
    link_s: float = 0.0
    #: Workers that can work; and those that have been started and cannot yet.
    working: int = 0
    coming: int = 0
    #: Why the platform starts no more workers; empty if nothing limits it.
    refused: str = ""


#: What of these only grows, as long as no service starts anew.
_COUNTED = ("asked", "due", "loads", "busy_s", "worker_s", "away_s", "late_s", "link_s")


def between(first: FlowCounts, last: FlowCounts) -> tuple[FlowCounts, float, float]:
    """What has happened between these; with the jobs' stall and reading time, seconds."""
    readings = [
        (one, first.readings.get(name, JobCounts(0, 0.0, 0.0))) for name, one in last.readings.items()
    ]
    counted = {name: getattr(last, name) - getattr(first, name) for name in _COUNTED}
    passed = FlowCounts(jobs=last.jobs, **counted)
    stall_s = sum(max(0.0, one.stall_s - then.stall_s) for one, then in readings)
    return passed, stall_s, sum(max(0.0, one.reading_s - then.reading_s) for one, then in readings)
