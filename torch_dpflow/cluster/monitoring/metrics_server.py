"""Metrics of a cluster for Prometheus, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch_dpflow._core.checks import is_loopback_host
from torch_dpflow._core.lazy import imported
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.monitoring.cluster_figures import (
    ClusterFigures,
    JobRow,
    ShardFigures,
    count_of,
    figures_of,
)
from torch_dpflow.cluster.monitoring.page_access import check_vacant, parse_address
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.messages.fields import UNNAMED
from torch_dpflow.log import SERVICE

#: The flows and processes of a cluster.
Views = tuple[list[FlowView], list[ProcessView]]

#: Metrics of each shard: name, whether it is a counter, field, and help text.
_SHARD_METRICS = (
    ("keys", False, "keys", "Keys that the shard owns."),
    ("workers", False, "workers", "Workers of the shard that run."),
    ("wants", True, "wants", "Samples that jobs have requested."),
    ("hits", True, "hits", "Requested samples that were cached or being loaded already."),
    ("hit_rate", False, "hit_rate", "Hits per requested sample."),
    ("decodes", True, "decodes", "Samples that workers have loaded."),
    ("samples_delivered", True, "served", "Samples that jobs have received."),
    ("delivered_bytes", True, "served_bytes", "Bytes of the samples that jobs have received."),
    ("decodes_per_sample", False, "decodes_per_sample", "Samples loaded per sample that a job received."),
    ("queue_depth", False, "queued", "Samples that wait to be loaded."),
    ("loading", False, "loading", "Samples that are being loaded."),
    ("cached_samples", False, "cached", "Samples in the cache."),
    ("pool_bytes", False, "held_bytes", "Bytes of samples that the shard holds."),
    ("pool_capacity_bytes", False, "room_bytes", "Most bytes of samples that the shard may hold."),
)
#: The same for each job.
_JOB_METRICS = (
    ("stall_seconds", True, "stall_s", "Seconds that the training loop has waited for a batch."),
    ("reading_seconds", True, "reading_s", "Seconds from the beginning of each epoch to its latest batch."),
    ("stall_share", False, "stall_share", "The share of the reading time that the training loop waited."),
    ("batches", True, "batches", "Batches handed to the training loop."),
    ("samples", True, "samples", "Samples in these batches."),
    ("bytes", True, "bytes", "Bytes of these samples, as they came."),
    ("worker_seconds", True, "worker_s", "Its part of the seconds for which workers have run."),
)


def check_metrics_address(address: str, *, public: bool) -> tuple[str, int]:
    """Return (host, port) of the address HOST:PORT.

    public: allow other hosts to read the metrics, which contain names of flows and jobs, without a key.

    Raises:
        OptionError: the address is not HOST:PORT, is in use, or is not loopback although `public` is False.
        MissingExtraError: the package for metrics is not installed.
    """
    host, port = parse_address("metrics", address, "127.0.0.1:9400")
    if not public and not is_loopback_host(host):
        raise OptionError(
            f"metrics={address!r} reaches beyond this host, so others could read the names of flows and "
            "jobs without a key; give 127.0.0.1, or --metrics-public if that is meant"
        )
    _require_client()
    check_vacant("metrics", host, port)
    return host, port


def serve_metrics(address: str, views: Callable[[], Views]) -> None:
    """Start threads that serve metrics at HOST:PORT until the process ends. An unusable address is only logged.

    views: returns the data; called for each answer, in one of these threads.
    """
    client = _require_client()
    host, _, port = address.rpartition(":")
    registry = client.CollectorRegistry()
    registry.register(_Collector(views))
    try:
        client.start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except OSError as error:  # not raised: jobs need no metrics
        SERVICE.error("metrics cannot be served at %s: %s", address, error.strerror or error)


class UnnamedJobs:
    """Combiner of each flow's unnamed jobs into one row: their random names would make a time series for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Latest rows of unnamed jobs by flow and job; sums of ended unnamed jobs by flow, while the flow exists.
        self._seen: dict[tuple[str, str], JobRow] = {}
        self._gone: dict[str, JobRow] = {}

    def combine(self, rows: Sequence[JobRow], flows: Collection[str]) -> list[JobRow]:
        """Return the rows of named jobs, and one row for the unnamed jobs of each flow, including ended ones.

        rows: all current jobs. flows: all existing flows; the counts of other flows are dropped.
        """
        unnamed = {(row.flow, row.job): row for row in rows if row.job.startswith(UNNAMED)}
        with self._lock:
            for key in self._seen.keys() - unnamed.keys():
                gone = self._seen[key]
                self._gone[gone.flow] = _sum_of(gone.flow, [gone, *filter(None, [self._gone.get(gone.flow)])])
            self._seen = unnamed
            self._gone = {flow: row for flow, row in self._gone.items() if flow in flows}
            by_flow = {flow: [row] for flow, row in self._gone.items()}
        for row in unnamed.values():
            by_flow.setdefault(row.flow, []).append(row)
        named = [row for row in rows if not row.job.startswith(UNNAMED)]
        return named + [_sum_of(flow, same) for flow, same in by_flow.items()]


def _sum_of(flow: str, rows: Sequence[JobRow]) -> JobRow:
    counts = [name for name in JobRow.__struct_fields__ if name not in ("flow", "job", "times")]
    sums = {name: sum(getattr(row, name) for row in rows) for name in counts}
    return JobRow(flow=flow, job=UNNAMED.rstrip("-"), **sums)


class _Collector:
    """Collector that converts a cluster's figures to metric families of Prometheus."""

    def __init__(self, views: Callable[[], Views]) -> None:
        self._views = views
        self._unnamed = UnnamedJobs()

    def collect(self) -> Iterable[Any]:
        flows, processes = self._views()
        figures = figures_of(flows, processes)
        yield from _of_flows(figures, flows)
        shards = [((row.flow, row.shard), row.figures) for row in figures.shards]
        for name, grows, field, text in _SHARD_METRICS:
            yield _family(f"dpflow_shard_{name}", grows, text, ("flow", "shard"), _read(shards, field))
        yield from _of_stages(shards)
        rows = self._unnamed.combine(figures.jobs, {row.flow for row in figures.flows})
        # Not "job", which is Prometheus' own label for a scrape target.
        jobs = [((row.flow, row.job), row) for row in rows]
        for name, grows, field, text in _JOB_METRICS:
            yield _family(f"dpflow_job_{name}", grows, text, ("flow", "job_name"), _read(jobs, field))
        yield from _of_processes(processes)


def _of_stages(shards: Sequence[tuple[tuple[str, ...], ShardFigures]]) -> Iterable[Any]:
    from prometheus_client.core import HistogramMetricFamily

    yield _family(
        "dpflow_shard_stage_seconds",
        True,
        "Seconds that its workers have taken for a stage of loading.",
        ("flow", "shard", "stage"),
        [((*labels, name), took) for labels, own in shards for name, took in own.times.stages.items()],
    )
    family = HistogramMetricFamily(
        "dpflow_shard_sample_seconds", "Seconds that its workers have taken for a sample.", labels=("flow", "shard")
    )
    for labels, own in shards:
        times = own.times
        family.add_metric(labels, times.cumulative(), times.read_s + times.decode_s + times.dataset_s)
    yield family


def _of_processes(processes: Sequence[ProcessView]) -> Iterable[Any]:
    labels = ("process", "role")
    yield _family(
        "dpflow_process_restarts",
        True,
        "How often a process has been restarted.",
        labels,
        [((view.id, view.role), view.restarts) for view in processes],
    )
    yield _family(
        "dpflow_process_malformed_messages",
        True,
        "Invalid messages that a service has dropped.",
        labels,
        [((view.id, view.role), count_of(view.status, "malformed")) for view in processes if view.address],
    )


def _of_flows(figures: ClusterFigures, flows: Sequence[FlowView]) -> Iterable[Any]:
    yield _family(
        "dpflow_flow_state",
        False,
        "1 for the state that the flow is in.",
        ("flow", "state"),
        [((flow.spec.instance, flow.state), 1) for flow in flows],
    )
    rows = [((row.flow,), row) for row in figures.flows]
    for name, grows, field, text in (
        ("jobs", False, "jobs", "Jobs that read the flow."),
        ("shards", False, "shards", "Shards that own keys."),
        ("workers_desired", False, "desired", "Workers that the flow is to have."),
        ("worker_seconds", True, "worker_s", "Seconds for which its workers have run."),
    ):
        yield _family(f"dpflow_flow_{name}", grows, text, ("flow",), _read(rows, field))
    yield _family(
        "dpflow_flow_limited_by",
        False,
        "1 for what keeps the flow's jobs from reading faster.",
        ("flow", "reason"),
        [((row.flow, row.limited_by), 1) for row in figures.flows if row.limited_by],
    )
    sums: list[tuple[tuple[str, ...], ShardFigures]] = [((row.flow,), row.figures) for row in figures.flows]
    for name, _, field, text in _SHARD_METRICS:
        if field in ("workers", "hit_rate", "decodes_per_sample", "queued"):
            yield _family(f"dpflow_flow_{name}", False, f"All shards: {text}", ("flow",), _read(sums, field))


def _read(rows: Sequence[tuple[tuple[str, ...], Any]], field: str) -> list[tuple[tuple[str, ...], float]]:
    return [(labels, getattr(row, field)) for labels, row in rows]


def _family(
    name: str, grows: bool, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if grows else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for own, value in values:
        family.add_metric(own, value)
    return family


def _require_client() -> Any:
    return imported("prometheus_client", "metrics need prometheus-client", "metrics")
