"""Figures of a cluster for display: rows for flows, shards and jobs, and how much jobs share. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from torch_dpflow._core.decoding import converted
from torch_dpflow._core.stage_times import StageTimes, total_of
from torch_dpflow.cluster.control.flow_registry import FlowState
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView, by_flow

T = TypeVar("T")
#: Jobs share little if at least `MIN_SERVED` samples were served, with at least `LITTLE` loads per served sample.
MIN_SERVED, LITTLE = 100, 0.9


class Sharing(NamedTuple):
    """Figures that show how far the jobs of a flow share loads. Counts are since the flow's shards started."""

    #: Number of samples that jobs have received, and number of samples that workers have loaded.
    served: int
    decodes: int
    #: Why little is shared, and what to change; empty if that is no concern or not known yet.
    why: str
    #: What to change, without the reason; empty for nothing.
    change: str = ""


def sharing_of(served: int, decodes: int, *, size: int, keeps: bool, jobs: int = 0) -> Sharing:
    """Return figures that show how far the jobs of a flow share loads.

    served, decodes: as in `Sharing`.
    size: number of samples of the flow. keeps: whether samples are cached for later readers. jobs: number of jobs that
        have read the flow; 0: unknown. A single job gets no advice about sharing.
    """
    if served < MIN_SERVED or decodes < LITTLE * served or (jobs == 1 and not keeps):
        return Sharing(served, decodes, "")
    if not keeps:
        why = (
            "a sample goes to the jobs that request it at about the same time, is dropped once they have it, and is "
            "loaded again for later readers, as it may be random. Start the jobs together, or say what may be cached: "
        )
        change = (
            "wrap the dataset in ALSDCache(dataset, SIZE, transform=what is random), or give "
            "JobOptions(repeatable=True) if nothing is"
        )
    elif served <= 1.1 * size:
        why, change = (
            "each sample has been read about once so far; samples are cached for later epochs and other jobs",
            "",
        )
    else:
        why = "its caches are too small to hold samples until they are read again: "
        change = "give them more memory (JobOptions(memory_bytes=...), `dpflow up --memory`)"
        change += "" if jobs == 1 else ", or start the jobs together"
    return Sharing(served, decodes, why + change, change)


class ShardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one shard, or of all shards of a flow together. Counts are since the start of the shard."""

    keys: int = 0
    workers: int = 0
    #: Samples that jobs have requested, and how many of them were cached or being loaded already.
    wants: int = 0
    hits: int = 0
    #: Samples that workers have loaded, and that jobs have received.
    decodes: int = 0
    served: int = 0
    served_bytes: int = 0
    #: Samples that wait to be loaded, that are being loaded, and that are cached.
    queued: int = 0
    loading: int = 0
    cached: int = 0
    #: Bytes of samples that the shard holds, and its capacity for samples.
    held_bytes: int = 0
    room_bytes: int = 0
    #: How long the shard's workers have taken to load, by stage.
    times: StageTimes = msgspec.field(default_factory=StageTimes)

    @property
    def hit_rate(self) -> float:
        """Requested samples that caused no load, per requested sample; 0.0 before the first request."""
        return self.hits / max(1, self.wants)

    @property
    def decodes_per_sample(self) -> float:
        """Samples loaded, per sample that a job received; 0.0 before a job has received one."""
        return self.decodes / self.served if self.served else 0.0


class ShardRow(msgspec.Struct, frozen=True, kw_only=True):
    flow: str
    shard: str
    figures: ShardFigures
    #: How often the shard, and its workers, have been restarted.
    restarts: int
    worker_restarts: int


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of one job. Counts are since the job started; see `torch_dpflow.cluster.messages.router.JobFigures`."""

    flow: str
    job: str
    stall_s: float
    reading_s: float
    batches: int
    samples: int
    bytes: int
    #: The job's part of the flow's worker-seconds.
    worker_s: float = 0.0
    #: How long the workers of a private loader have taken to load, by stage; None for a job of a flow.
    times: StageTimes | None = None

    @property
    def key(self) -> str:
        """Key of the job, unique among the jobs of all flows."""
        return f"{self.flow} {self.job}"

    @property
    def stall_share(self) -> float:
        """Share of the job's reading time in which it waited for data, 0 to 1."""
        return min(1.0, self.stall_s / self.reading_s) if self.reading_s else 0.0


class FlowRow(msgspec.Struct, frozen=True, kw_only=True):
    #: Name and version.
    flow: str
    state: str
    jobs: int
    #: Generation of the flow's routing table; 0 while its router does not run.
    generation: int
    shards: int
    figures: ShardFigures
    #: Why its jobs share little, and what to change, as in `Sharing`.
    sharing: str
    #: What to change so that jobs share more; empty for nothing.
    cache_advice: str = ""
    #: How often its router, its shards and its workers have been restarted.
    restarts: int
    #: Name of what limits the speed of its jobs, as in `FlowView`; empty if not known.
    limited_by: str = ""
    #: Desired number of workers, and the worker-seconds so far.
    desired: int = 0
    worker_s: float = 0.0


class ClusterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of all flows, shards and jobs at one moment."""

    flows: list[FlowRow]
    shards: list[ShardRow]
    jobs: list[JobRow]


#: Counts among a shard's figures, and their names in the shard's status if different.
_COUNTS = tuple(name for name in ShardFigures.__struct_fields__ if name != "times")
_NAMES = {"hits": "shared", "room_bytes": "capacity_bytes"}


def figures_of(flows: Sequence[FlowView], processes: Sequence[ProcessView]) -> ClusterFigures:
    shards: list[ShardRow] = []
    jobs: list[JobRow] = []
    rows: list[FlowRow] = []
    views = by_flow(processes)
    for flow in flows:
        instance = flow.spec.instance
        own = views[instance]
        mine = [_shard_row(instance, view, own) for view in own if view.role == "shard"]
        routers = [view for view in own if view.role == "router"]
        shards += mine
        taken = {} if flow.workers_s is None else flow.workers_s.by_job
        jobs += [row for view in routers for row in _job_rows(instance, view, taken)]
        figures, spec = _sum([row.figures for row in mine]), flow.spec
        keeps = (spec.repeatable or spec.staged) and spec.policy != "none"
        seen = max((count_of(view.status, "jobs_seen") for view in routers), default=0)
        sharing = sharing_of(figures.served, figures.decodes, size=spec.size, keeps=keeps, jobs=seen)
        rows.append(
            FlowRow(
                flow=instance,
                state=flow.state,
                jobs=flow.jobs,
                generation=max((count_of(view.status, "generation") for view in routers), default=0),
                shards=sum(row.figures.keys > 0 for row in mine),
                figures=figures,
                sharing=sharing.why,
                cache_advice=sharing.change,
                restarts=sum(view.restarts for view in own),
                limited_by=flow.limited_by,
                desired=0 if flow.part is None else flow.part.workers,
                worker_s=0.0 if flow.workers_s is None else flow.workers_s.total,
            )
        )
    return ClusterFigures(flows=rows, shards=shards, jobs=jobs)


def state_words(state: str) -> str:
    return "being read" if state == FlowState.ACCESSED.value else state


def _shard_row(instance: str, view: ProcessView, own: Sequence[ProcessView]) -> ShardRow:
    workers = [one for one in own if one.role == "worker" and one.id.startswith(f"{view.id}/")]
    counts = {name: count_of(view.status, _NAMES.get(name, name)) for name in _COUNTS}
    return ShardRow(
        flow=instance,
        shard=view.id.rpartition("/")[2],
        figures=ShardFigures(**counts, times=figure_of(view.status, "times", StageTimes)),
        restarts=view.restarts,
        worker_restarts=sum(one.restarts for one in workers),
    )


def _job_rows(instance: str, router: ProcessView, taken: Mapping[str, float]) -> list[JobRow]:
    readings = router.status.get("readings")
    if not isinstance(readings, dict):
        return []
    return [
        JobRow(flow=instance, job=str(name), worker_s=taken.get(str(name), 0.0), **reading)
        for name, reading in sorted(readings.items())
    ]


def _sum(figures: Sequence[ShardFigures]) -> ShardFigures:
    counts = {name: sum(getattr(one, name) for one in figures) for name in _COUNTS}
    return ShardFigures(**counts, times=total_of([one.times for one in figures]))


def figure_of(status: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the figure `name` in a process's status, converted to `kind`; `kind()` if it is absent or invalid."""
    with suppress(msgspec.ValidationError):
        return converted(status.get(name, []), kind)
    return kind()


def count_of(status: dict[str, Any], name: str) -> int:
    """Return the count `name` in the status of a process; 0 if it is absent or not an integer."""
    value = status.get(name)
    return value if isinstance(value, int) else 0
