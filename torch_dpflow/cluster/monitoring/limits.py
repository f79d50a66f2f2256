"""Explanation of each limit, with what to change; and the first line of the live page. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch_dpflow.cluster.monitoring.page_figures import FlowLine, Headline, JobLine

#: A job that waits less than this share of its time is limited by its training, whatever limits its flow.
LITTLE_STALL = 0.05


class Limit(NamedTuple):
    """A limit in two or three words, in a clause, and what to change. NAME stands for the name of the flow."""

    words: str
    meaning: str
    change: str
    otherwise: str = ""


#: By the value of `FlowView.limited_by`.
FLOW_LIMITS = {
    "": Limit(
        "not known yet",
        "not known, as the cluster has not reported it yet",
        "nothing yet; it is reported within some seconds of reading, also by `dpflow workers`",
    ),
    "job": Limit("the training itself", "for the cluster, the training itself", "nothing; the wait is over"),
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
_LOADER_WORDS = {"processors": "the processors", "start": "the start of epochs", "loading": "loading"}
#: Advice for a job that waits although its batches arrived in time.
_OWN_PROCESS = "look at what else runs on the job's host, and at its collate_fn: its batches arrived in time"


def limit_of(by: str) -> Limit:
    """Return a limit by its word; any unknown word is a limit of the platform."""
    found = FLOW_LIMITS.get(by)
    return found or Limit(
        _LOADER_WORDS.get(by, f"the platform: {by}"),
        f"its workers' platform: {by}",
        "ask the platform for more, or share more",
    )


def advice_of(by: str, flow: str) -> str:
    """Return what to change about a limited flow; empty for nothing. flow: name and version."""
    return "" if by in ("", "job") else limit_of(by).change.replace("NAME", flow.rpartition(":v")[0])


def headline_of(kind: str, jobs: Sequence[JobLine], flows: Mapping[str, FlowLine]) -> Headline:
    """Return what limits the run, and what to try. kind: "cluster" or "loader"."""
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
