"""Observations of a cluster or a loader at one moment, and the rows that the live page shows. Pure functions.

The module also contains the explanation of each limit, with advice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from torch_dpflow.cluster.control.flow_registry import LITTLE_STALL
from torch_dpflow.cluster.control.supervision import UP
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView, instance_of
from torch_dpflow.cluster.monitoring.cluster_figures import FlowRow, JobRow, figure_of, figures_of
from torch_dpflow.ipc.messages.remote_worker import RemoteWorkerView

#: Maximum number of jobs and of processes on one page. The page shows how many more there are.
MAX_JOBS, MAX_PROCESSES = 256, 1024
#: States of processes of nodes. Remote workers have the states of `WorkerState`.
RUNNING, STARTING, DOWN = "running", "starting", "down"


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a worker or a service."""

    id: str
    #: Name and version of its flow; empty if the process serves all flows.
    flow: str
    role: str
    state: str
    #: Where it runs, such as "pid 7 of node a", for display; empty if it does not run.
    where: str = ""
    restarts: int = 0
    #: How the previous process of this id ended; empty if there was none, or if its end is not known.
    ended: str = ""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of all flows, jobs and processes at one moment. Counts are as in `FlowRow` and `JobRow`."""

    flows: list[FlowRow] = []
    jobs: list[JobRow] = []
    processes: list[ProcessRow] = []
    #: (Name of the limit, advice) of jobs, by `JobRow.key`. A job without an entry has the limit of its flow.
    limits: dict[str, tuple[str, str]] = {}
    #: Number of restarts in total; None: the sum of the restarts in `processes`.
    restarts: int | None = None
    #: Failure of the coordinator, such as "does not answer"; the rows are then its latest values. Empty: no failure.
    failure: str = ""


class FlowLine(FlowRow, frozen=True, kw_only=True):
    """Flow on the page: its row, its state in words, and rates, which are None if unknown."""

    #: Hit rate and decodes per sample: since the flow's shards started, and (`_now`) over the last seconds.
    hit_rate: float | None
    hit_rate_now: float | None
    decodes: float | None
    decodes_now: float | None
    samples_per_s: float | None
    #: Texts on how long samples took to load in the last seconds, and on the shares of the stages; empty if not known.
    sample: str
    stages: str
    #: `limited_by` in words, and what to change; empty for nothing.
    limit: str
    advice: str


class JobLine(JobRow, frozen=True, kw_only=True):
    """Job on the page: its row, and rates, which are None if the job has read nothing in the last seconds."""

    #: Share of the time in which the job waited: since it started, and over the last seconds.
    stall: float
    stall_now: float | None
    samples_per_s: float | None
    #: As in `FlowLine`. Advice is empty if the line of the flow has it; `sample` and `stages` are only for loaders.
    limited_by: str
    limit: str
    advice: str
    sample: str
    stages: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all flows and jobs: rates over the last seconds, which are None if unknown, and present numbers."""

    samples_per_s: float | None
    #: Share of their time in which the jobs that read have waited for data.
    stall: float | None
    hit_rate: float | None
    decodes: float | None
    jobs: int
    workers: int
    desired: int
    restarts: int


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the page: what limits the jobs most, and advice."""

    text: str
    #: What to change; empty for nothing.
    advice: str
    #: "good", "wait" or "bad".
    state: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Event of the history. kind: "restart", "end", "begin", "change" or "failure"."""

    number: int
    #: Seconds since 1970.
    at: float
    kind: str
    subject: str
    text: str


class History(msgspec.Struct, kw_only=True):
    """Figures over time: for each job or flow, a value or None for each moment in `at` (seconds since 1970)."""

    at: list[float]
    stall: dict[str, list[float | None]]
    rate: dict[str, list[float | None]]
    hit_rate: dict[str, list[float | None]]
    decodes: dict[str, list[float | None]]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Update of the page: all rows, with the new events and points of the history, or with all of them if `whole`."""

    number: int
    whole: bool
    #: "cluster" or "loader", and its name for display.
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
    #: Numbers of further jobs and processes, which the page does not list.
    more_jobs: int
    more_processes: int
    events: list[Event]
    history: History


def observation_of(flows: Sequence[FlowView], processes: Sequence[ProcessView], failure: str = "") -> Observation:
    """Return the observation of a cluster, from the views of coordinator and node. failure: as in `Observation`."""
    figures = figures_of(flows, processes)
    rows = [row for view in processes for row in _rows_of(view)]
    return Observation(flows=figures.flows, jobs=figures.jobs, processes=rows, failure=failure)


def _rows_of(view: ProcessView) -> Iterator[ProcessRow]:
    flow = instance_of(view.id)
    is_up = bool(view.status.get(UP)) if view.role == "worker" else bool(view.address)
    has_run = view.runs or view.restarts > 0 or bool(view.ended)
    yield ProcessRow(
        id=view.id,
        flow=flow,
        role=view.role,
        state=DOWN if has_run and not view.runs else RUNNING if is_up else STARTING,
        where=f"pid {view.pid}{' of node ' + view.node if view.node else ''}" if view.pid else "",
        restarts=view.restarts,
        ended=view.ended.partition("\n")[0],
    )
    for worker in figure_of(view.status, "remote_workers", list[RemoteWorkerView]):
        yield ProcessRow(id=worker.name, flow=flow, role="worker", state=worker.state, where=worker.where)


class Limit(NamedTuple):
    """Texts about a limit: a name, an explanation, what to change, and what else helps. NAME stands for the flow."""

    words: str
    meaning: str
    change: str
    otherwise: str = ""


FLOW_LIMITS = {
    "": Limit(
        "not known yet",
        "not known, as the cluster has not reported it yet",
        "nothing yet; it is reported within some seconds of reading, also by `dpflow workers`",
    ),
    "job": Limit(
        "the training itself",
        "for the cluster, the training itself",
        "nothing if it waits little; otherwise give the training process more processors",
    ),
    "workers": Limit(
        "too few workers",
        "its workers, which load less than its jobs could read",
        "more of them while their host has free processors: `dpflow flow scale NAME --workers N`",
        "have their number follow demand (`dpflow up --autoscale MIN:MAX`), cache what is decoded (ALSDCache) or "
        "decode faster (images: torch_dpflow.vision)",
    ),
    "cold start": Limit("workers that start", "workers that are starting", "nothing; wait until they work"),
    "budget": Limit(
        "the number of workers allowed",
        "all workers that are allowed work",
        "a higher MAX of `dpflow up --autoscale MIN:MAX`",
    ),
    "shard": Limit(
        "the thread of a shard",
        "the thread of a shard, which serves samples and is busy all the time; there may be no more shards, or they do "
        "not help",
        "let it have more shards, each of which needs a worker: `dpflow flow scale NAME --shards auto --workers N`",
        "add processors (a larger host, or others by `dpflow node`), or read fewer and larger samples",
    ),
    "processors": Limit(
        "the processors",
        "the processors of the workers' host, which they use up or wait for",
        "decode faster (images: torch_dpflow.vision), cache what is decoded (ALSDCache), or run workers on other hosts "
        "(`dpflow up --platform`, `dpflow node`); more workers here would not help",
    ),
    "storage": Limit(
        "the storage",
        "the storage or the processors of the workers' host; more workers brought nothing",
        "cache what is decoded (ALSDCache), decode faster (images: torch_dpflow.vision), or run workers elsewhere "
        "(`dpflow up --platform`)",
    ),
    "network": Limit(
        "the network",
        "the network: samples are loaded faster than it carries them, to jobs or from the workers of a platform",
        "smaller samples (images as uint8), workers that are nearer, or a larger JobOptions(ready=..., requested=...)",
    ),
}
#: Limits of a private loader only; its figures decide what to change.
_LOADER_WORDS = {"start": "the start of epochs", "loading": "loading"}
#: Advice for a job that waits although its batches arrived in time.
_OWN_PROCESS = "look at what else runs on the job's host, and at its collate_fn: its batches arrived in time"


def limit_of(by: str) -> Limit:
    """Return the texts about the limit `by`. A name that is not in `FLOW_LIMITS` is a loader's or the platform's."""
    found = FLOW_LIMITS.get(by)
    return found or Limit(
        _LOADER_WORDS.get(by, f"the platform: {by}"),
        f"its workers' platform: {by}",
        "ask the platform for more",
    )


def advice_of(by: str, flow: str) -> str:
    """Return advice for a flow whose limit is `by`: what to change; empty for nothing. flow: name and version."""
    return "" if by in ("", "job") else limit_of(by).change.replace("NAME", flow.rpartition(":v")[0])


def headline_of(kind: str, jobs: Sequence[JobLine], flows: Mapping[str, FlowLine]) -> Headline:
    """Return the headline: what limits jobs or loaders most, and advice. kind: "cluster" or "loader"."""
    noun = "loader" if kind == "loader" else "job"
    if not jobs:
        advice = "" if flows or noun == "loader" else 'a loader with flow="NAME" and its job are shown here'
        return Headline(text=f"No {noun} reads now.", advice=advice, state="wait")
    reading = [job for job in jobs if job.stall_now is not None]
    waits: dict[tuple[str, str], list[JobLine]] = defaultdict(list)
    for job in reading:
        if (job.stall_now or 0.0) >= LITTLE_STALL:
            waits[job.limited_by, job.flow].append(job)
    if not reading:
        return Headline(text=f"No {noun} has read anything in the last seconds.", advice="", state="wait")
    if not waits:
        who = f"the {noun} waits" if len(reading) == 1 else f"all {len(reading):,} {noun}s wait"
        text = f"Data is not the bottleneck: {who} less than {LITTLE_STALL:.0%} of the time for it."
        return Headline(text=text, advice="a faster training step; more workers would not help", state="good")
    (by, flow), most = max(waits.items(), key=lambda item: sum(job.stall_now or 0.0 for job in item[1]))
    return _waiting(by, flows.get(flow), most, len(reading))


def _waiting(by: str, flow: FlowLine | None, waiting: Sequence[JobLine], reading: int) -> Headline:
    """Return the headline of jobs of one flow, or of loaders, that wait for the same reason."""
    first = max(waiting, key=lambda job: job.stall_now or 0.0)
    who = f"{first.job} waits {first.stall_now:.0%} of its time for data"
    if reading > 1:
        who += f" ({len(waiting):,} of {reading:,} wait)"
    if by == "":
        return Headline(text=f"{who}; the reason is not known yet.", advice="", state="wait")
    if by == "job":
        return Headline(text=f"{who}, in its own process.", advice=_OWN_PROCESS, state="wait")
    advice = [first.advice]
    if flow is not None:
        advice = [
            advice_of(by, flow.flow),
            flow.cache_advice and f"against cache misses: {flow.cache_advice}",
        ]
    text = f"Limited by {limit_of(by).words}: {who}."
    return Headline(text=text, advice="; ".join(filter(None, advice)), state="bad")
