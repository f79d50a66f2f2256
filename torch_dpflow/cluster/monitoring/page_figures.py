"""What the live page is told of a cluster or a loader at one moment, and what it shows of that. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torch_dpflow.cluster.control.supervision import UP
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.monitoring.cluster_figures import FlowRow, JobRow, figures_of
from torch_dpflow.ipc.messages.launch_spec import RemoteWorkerView

#: Most jobs and processes that one page shows; it says how many more there are.
MOST_JOBS, MOST_PROCESSES = 256, 1024
#: States of processes of this host; those of members are `WorkerState`'s.
RUNNING, STARTING, DOWN = "running", "starting", "down"


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker or a service."""

    id: str
    #: The name and version of the flow that it serves; empty: it serves all.
    flow: str
    role: str
    state: str
    #: Its host and process id, for people.
    where: str = ""
    restarts: int = 0
    #: How the process before it ended; empty: there was none, or nobody knows.
    ended: str = ""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at one moment. Counts are as of `FlowRow` and `JobRow`."""

    flows: list[FlowRow] = []
    jobs: list[JobRow] = []
    processes: list[ProcessRow] = []
    #: What limits jobs that wait, and what to change, by `JobRow.key`; of others, their flows say it.
    limits: dict[str, tuple[str, str]] = {}
    #: Of all, where processes do not tell; None: they do.
    restarts: int | None = None
    #: What is wrong with the coordinator, as "does not answer"; empty: nothing. What it told is as it was then.
    failure: str = ""


class FlowLine(msgspec.Struct, frozen=True, kw_only=True):
    """A flow, as the page shows it. None: nothing can be said yet."""

    flow: str
    state: str
    jobs: int
    shards: int
    workers: int
    desired: int
    #: Since its shards have started, and of the last seconds.
    hit_rate: float | None
    hit_rate_now: float | None
    decodes: float | None
    decodes_now: float | None
    samples_per_s: float | None
    queued: int
    cached: int
    held_bytes: int
    room_bytes: int
    restarts: int
    #: In one word for programs, and in words for people.
    limited_by: str
    limit: str
    #: What to change about it; empty: nothing.
    advice: str
    sharing: str
    #: What to change where its caches hold little; empty: nothing.
    cache_advice: str


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the page shows it. None: it has read nothing in the last seconds."""

    key: str
    flow: str
    job: str
    #: Since it began, and of the last seconds.
    stall: float
    stall_now: float | None
    samples_per_s: float | None
    batches: int
    samples: int
    bytes: int
    #: As of `FlowLine`.
    limited_by: str
    limit: str
    #: What to change, where its flow's line does not say it.
    advice: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All flows and jobs together, of the last seconds. None: nothing can be said."""

    samples_per_s: float | None
    #: Of all jobs that read.
    stall: float | None
    hit_rate: float | None
    decodes: float | None
    jobs: int
    workers: int
    desired: int
    restarts: int


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """The page's first line: what limits the run, and what to try."""

    text: str
    #: Empty: nothing.
    advice: str
    #: "good", "wait" or "bad".
    state: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has happened. kind: "restart", "end", "begin", "change" or "failure"."""

    number: int
    #: Seconds since 1970.
    at: float
    kind: str
    subject: str
    text: str


class History(msgspec.Struct, kw_only=True):
    """Figures over time: for each of `at`, seconds since 1970, a value of each job or flow, or None."""

    at: list[float]
    stall: dict[str, list[float | None]]
    rate: dict[str, list[float | None]]
    hit_rate: dict[str, list[float | None]]
    decodes: dict[str, list[float | None]]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What the page is sent: all, or with `whole` False what has come since the update before."""

    number: int
    whole: bool
    #: "cluster" or "loader", and its name for people.
    kind: str
    title: str
    version: str
    at: float
    failure: str
    headline: Headline
    summary: Summary
    flows: list[FlowLine]
    jobs: list[JobLine]
    processes: list[ProcessRow]
    #: How many more jobs and processes there are.
    more_jobs: int
    more_processes: int
    events: list[Event]
    history: History


def observation_of(
    flows: Sequence[FlowView], processes: Sequence[ProcessView], failure: str = ""
) -> Observation:
    """What is known of a cluster, from the views of its coordinator and of its node."""
    figures = figures_of(flows, processes)
    rows = [row for view in processes for row in _rows_of(view)]
    return Observation(flows=figures.flows, jobs=figures.jobs, processes=rows, failure=failure)


def _rows_of(view: ProcessView) -> Iterator[ProcessRow]:
    flow = _flow_of(view.id)
    is_up = bool(view.status.get(UP)) if view.role == "worker" else bool(view.address)
    has_run = view.runs or view.restarts > 0 or bool(view.ended)
    yield ProcessRow(
        id=view.id,
        flow=flow,
        role=view.role,
        state=DOWN if has_run and not view.runs else RUNNING if is_up else STARTING,
        where=f"pid {view.pid}{' of node ' + view.node if view.node else ''}" if view.pid else "",
        restarts=view.restarts,
        ended=view.ended,
    )
    for member in _members_of(view.status):
        yield ProcessRow(id=member.name, flow=flow, role="worker", state=member.state, where=member.where)


def _flow_of(id: str) -> str:
    """The flow of NAME:vN/shard-000/worker-0."""
    name, mark, rest = id.partition(":v")
    return f"{name}:v{rest.partition('/')[0]}" if mark else ""


def _members_of(status: dict[str, Any]) -> list[RemoteWorkerView]:
    try:
        return msgspec.convert(status.get("members", []), list[RemoteWorkerView])
    except msgspec.ValidationError:
        return []  # a figure for people: what a later release tells ends nothing
