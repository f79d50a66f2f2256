"""History of a cluster or a loader: rates of the last ten minutes, and events. A pure state machine.

The caller observes about once a second. Counters that fall because their process was restarted give no rate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

import msgspec

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow._version import __version__
from torch_dpflow.cluster.control.flow_registry import LITTLE_STALL
from torch_dpflow.cluster.monitoring.cluster_figures import FlowRow, JobRow, state_words
from torch_dpflow.cluster.monitoring.page_figures import (
    DOWN,
    MAX_JOBS,
    MAX_PROCESSES,
    RUNNING,
    Event,
    FlowLine,
    History,
    JobLine,
    Observation,
    ProcessRow,
    Summary,
    Update,
    advice_of,
    headline_of,
    limit_of,
)

#: Interval over which rates are computed (seconds).
WINDOW_S = 5.0
#: Maximum number of points of the history, of jobs and of flows in it, and of events.
MAX_POINTS, MAX_SERIES, MAX_EVENTS = 600, 64, 200
#: Maximum number of similar events of one moment that are listed separately.
MAX_ALONE = 4
#: Name of the limit of a job that hardly waits for data.
OWN_PACE = "job"
#: States of a worker that loads, or is ready to load.
AT_WORK = (RUNNING, "working", "on deck")


class PageHistory:
    """Source of the page's updates, computed from observations. Not thread-safe.

    Args:
        kind: "cluster" or "loader".
        title: name for display.
    """

    def __init__(self, kind: str, title: str) -> None:
        self._kind, self._title = kind, title
        #: Number of the latest update; 0 before the first.
        self.number = 0
        #: Observations of the last seconds with their times, oldest first.
        self._seen: deque[tuple[float, dict[str, JobRow], dict[str, FlowRow]]] = deque()
        self._before: Observation | None = None
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._event_number = 0
        self._history = History(at=[], stall={}, rate={}, hit_rate={}, decodes={})
        self._latest: Update

    def observe(self, seen: Observation, at: float) -> Update:
        """Add an observation; return the update for pages that have the previous update. at: seconds since 1970."""
        jobs = {row.key: row for row in seen.jobs}
        flows = {row.flow: row for row in seen.flows}
        while self._seen and not at - WINDOW_S <= self._seen[0][0] < at:
            self._seen.popleft()
        limits = {row.key: (flows[row.flow].limited_by, "") for row in seen.jobs if row.flow in flows}
        limits.update(seen.limits)
        job_lines = [self._job_line(row, *limits.get(key, ("", ""))) for key, row in jobs.items()]
        flow_lines = [self._flow_line(row, at) for row in flows.values()]
        self._seen.append((at, jobs, flows))
        events = list(self._events_of(seen, at))
        self._events.extend(events)
        self._before = seen
        self.number += 1
        self._latest = Update(
            number=self.number,
            whole=False,
            kind=self._kind,
            title=self._title,
            version=__version__,
            at=at,
            failure=seen.failure,
            headline=headline_of(self._kind, job_lines, {line.flow: line for line in flow_lines}),
            summary=self._summary(seen, job_lines),
            flows=flow_lines,
            jobs=job_lines[:MAX_JOBS],
            processes=_shown(seen.processes),
            more_jobs=max(0, len(job_lines) - MAX_JOBS),
            more_processes=max(0, len(seen.processes) - MAX_PROCESSES),
            events=events,
            history=_point(job_lines[:MAX_SERIES], flow_lines[:MAX_SERIES], at),
        )
        self._extend(self._latest.history)
        return self._latest

    def whole(self) -> Update:
        """Return the latest update with the whole history, for a page that has none. Call `observe` first."""
        fields = {name: getattr(self._latest, name) for name in Update.__struct_fields__}
        return Update(**{**fields, "whole": True, "events": list(self._events), "history": self._history})

    # -- rates -----------------------------------------------------------------------------------------------

    def _job_line(self, row: JobRow, limit: str, advice: str) -> JobLine:
        before = next((jobs[row.key] for _, jobs, _ in self._seen if row.key in jobs), row)
        stall = _share(row.stall_s - before.stall_s, row.reading_s - before.reading_s)
        if stall is None or stall < LITTLE_STALL:
            limit, advice = "" if stall is None else OWN_PACE, ""
        sample, stages = ("", "") if row.times is None else _recent(row.times, before.times)
        return JobLine(
            **{**msgspec.structs.asdict(row), "times": None},
            stall=round(row.stall_share, 4),
            stall_now=stall,
            # By the clock of the job, as its reports arrive at uneven times.
            samples_per_s=_rate(row.samples - before.samples, row.reading_s - before.reading_s),
            limited_by=limit,
            limit=limit_of(limit).words if limit else "",
            advice=advice,
            sample=sample,
            stages=stages,
        )

    def _flow_line(self, row: FlowRow, at: float) -> FlowLine:
        since, before = at, row
        for then, _, flows in self._seen:
            if (found := flows.get(row.flow)) is not None:
                since, before = then, found
                break
        now = row.figures
        was = before.figures if row.jobs else now  # else the last seconds of a job that has left would be shown
        sample, stages = _recent(now.times, was.times)
        return FlowLine(
            **{**msgspec.structs.asdict(row), "state": state_words(row.state)},
            hit_rate=round(now.hit_rate, 4) if now.wants else None,
            hit_rate_now=_share(now.hits - was.hits, now.wants - was.wants),
            decodes=round(now.decodes_per_sample, 4) if now.served else None,
            decodes_now=_ratio(now.decodes - was.decodes, now.served - was.served),
            samples_per_s=_rate(now.served - was.served, at - since) if row.jobs else None,
            sample=sample,
            stages=stages,
            limit=limit_of(row.limited_by).words if row.limited_by else "",
            advice=advice_of(row.limited_by, row.flow),
        )

    def _summary(self, seen: Observation, jobs: list[JobLine]) -> Summary:
        earliest = self._seen[0][2]
        # Only flows that were known then: the counts of others are older.
        shared = [(row.figures, earliest[row.flow].figures) for row in seen.flows if row.flow in earliest and row.jobs]
        hits, wants, decodes, served = (
            sum(getattr(now, name) - getattr(was, name) for now, was in shared)
            for name in ("hits", "wants", "decodes", "served")
        )
        rates = [job.samples_per_s for job in jobs if job.samples_per_s is not None]
        stalls = [job.stall_now for job in jobs if job.stall_now is not None]
        workers = [row for row in seen.processes if row.role == "worker"]
        return Summary(
            samples_per_s=round(sum(rates), 1) if rates else None,
            stall=round(sum(stalls) / len(stalls), 4) if stalls else None,
            hit_rate=_share(hits, wants),
            decodes=_ratio(decodes, served),
            jobs=len(seen.jobs),
            workers=sum(row.state in AT_WORK for row in workers),
            desired=max(sum(row.desired for row in seen.flows), len(workers)),
            restarts=sum(row.restarts for row in seen.processes) if seen.restarts is None else seen.restarts,
        )

    # -- over time -------------------------------------------------------------------------------------------

    def _extend(self, point: History) -> None:
        history = self._history
        history.at += point.at
        cut = max(0, len(history.at) - MAX_POINTS)
        del history.at[:cut]
        length = len(history.at)
        for kept, new in _series(history, point):
            for key in new:
                kept.setdefault(key, [None] * (length - 1 + cut))
            for key, values in kept.items():
                values += new.get(key, [None])
                del values[:cut]
            for key in [key for key in kept if key not in new]:
                if len(kept) > MAX_SERIES or all(one is None for one in kept[key]):
                    del kept[key]

    def _events_of(self, seen: Observation, at: float) -> Iterator[Event]:
        before = self._before
        if before is None:
            return
        found = [*_failures(before, seen), *_of_processes(before, seen), *_of_flows(before, seen)]
        if self._kind == "loader":  # whose workers start and end with each epoch
            found = [one for one in found if one[0] == "restart"]
        for kind, subject, text in _combined(found):
            self._event_number += 1
            yield Event(number=self._event_number, at=at, kind=kind, subject=subject, text=text)


#: Kind, subject, text; for similar events of one moment also the group, such as "workers of FLOW".
_Found = tuple[str, str, str, str]


def _failures(before: Observation, seen: Observation) -> Iterator[_Found]:
    if seen.failure and not before.failure:
        yield "failure", "coordinator", seen.failure, ""
    elif before.failure and not seen.failure:
        yield "change", "coordinator", "answers again", ""


def _of_processes(before: Observation, seen: Observation) -> Iterator[_Found]:
    earlier = {row.id: row for row in before.processes}
    for row in seen.processes:
        was = earlier.pop(row.id, None)
        like = f"{row.role}s of {row.flow or 'the cluster'}"
        if was is None:
            yield "begin", row.id, "began" + (f" as {row.where}" if row.where else ""), like
        elif row.restarts > was.restarts:
            why = f": {row.ended}" if row.ended else ""
            yield "restart", row.id, f"was restarted{why}", like
        elif row.state == DOWN != was.state:
            yield "end", row.id, "ended, and will be started again", like
    for row in earlier.values():
        yield "end", row.id, "ended", f"{row.role}s of {row.flow or 'the cluster'}"


def _of_flows(before: Observation, seen: Observation) -> Iterator[_Found]:
    earlier = {row.flow: row for row in before.flows}
    for row in seen.flows:
        was = earlier.get(row.flow)
        if was is None or was.state != row.state:
            yield "change", row.flow, f"is {state_words(row.state)}", "flows"
    jobs, were = ({(row.flow, row.job) for row in one.jobs} for one in (seen, before))
    for flow, job in sorted(jobs - were):
        yield "begin", job, f"reads {flow}", f"jobs of {flow}"
    for flow, job in sorted(were - jobs):
        yield "end", job, f"has left {flow}", f"jobs of {flow}"


def _combined(found: list[_Found]) -> Iterable[tuple[str, str, str]]:
    """Yield (kind, subject, text) of each event; similar ones as one event if there are more than `MAX_ALONE`.

    Otherwise a flow with hundreds of workers would fill the log.
    """
    counts = Counter((kind, like) for kind, _, _, like in found if like)
    listed: set[tuple[str, str]] = set()
    for kind, subject, text, like in found:
        if counts[kind, like] <= MAX_ALONE:
            yield kind, subject, text
        elif (kind, like) not in listed:
            listed.add((kind, like))
            did = {"begin": "began", "restart": "were restarted", "end": "ended"}.get(kind, "changed")
            yield kind, like, f"{counts[kind, like]} {did}, {subject} first"


def _shown(processes: list[ProcessRow]) -> list[ProcessRow]:
    """Return the processes to show: if there are too many, prefer processes that do not work."""
    if len(processes) <= MAX_PROCESSES:
        return processes
    return sorted(processes, key=lambda row: row.state in AT_WORK)[:MAX_PROCESSES]


def _point(jobs: list[JobLine], flows: list[FlowLine], at: float) -> History:
    return History(
        at=[at],
        stall={job.key: [job.stall_now] for job in jobs},
        rate={job.key: [job.samples_per_s] for job in jobs},
        hit_rate={flow.flow: [flow.hit_rate_now] for flow in flows},
        decodes={flow.flow: [flow.decodes_now] for flow in flows},
    )


def _series(
    one: History, other: History
) -> Iterator[tuple[dict[str, list[float | None]], dict[str, list[float | None]]]]:
    for name in ("stall", "rate", "hit_rate", "decodes"):
        yield getattr(one, name), getattr(other, name)


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 and part >= 0 else None


def _recent(now: StageTimes, before: StageTimes | None) -> tuple[str, str]:
    """Return the two texts of `StageTimes.shown` for the time between `before` and `now`.

    If nothing was loaded in this time, they are for the time since the start.
    """
    recent = now if before is None else now.since(before)
    return (recent if recent.counts else now).shown()


def _share(part: float, whole: float) -> float | None:
    ratio = _ratio(part, whole)
    return None if ratio is None else min(1.0, ratio)


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 1) if seconds > 0 and count >= 0 else None
