"""What a running cluster tells: metrics for Prometheus and structured lines, both against what really happens."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster_command import CommandedCluster
from tests.new_process import ROOT
from tests.shared_cluster import free_port, wait
from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.client.options import draw_name
from torch_dpflow.cluster.monitoring.cluster_figures import JobRow
from torch_dpflow.cluster.monitoring.metrics_server import UnnamedJobs

SAMPLES = 90
STAGES = tuple(StageTimes().stages)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandedCluster]:
    """A cluster with metrics, which logs in JSON."""
    started = CommandedCluster.up(
        tmp_path_factory.mktemp("c"), "--metrics", f"127.0.0.1:{free_port()}", "--log-format", "json"
    )
    wait(lambda: answers(started), what="the metrics")  # which come up by themselves
    yield started
    started.stop()


class Scrape:
    """The metrics at one moment."""

    def __init__(self, cluster: CommandedCluster) -> None:
        with urllib.request.urlopen(f"http://{cluster.facts['metrics']}/metrics", timeout=150) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            text = answer.read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of what these labels select."""
        family = self.families[re.sub("_(total|bucket|count|sum)$", "", name)]
        assert family.documentation
        return sum(
            sample.value for sample in family.samples if sample.name == name and labels.items() <= sample.labels.items()
        )


def read(job: SharedJob, epoch: int) -> int:
    return sum(len(keys) for _, keys in job.traverse(epoch))


def answers(cluster: CommandedCluster) -> bool:
    try:
        Scrape(cluster)
    except OSError:
        return False
    return True


def test_a_scrape_says_what_happened(
    cluster: CommandedCluster, join: Callable[..., SharedJob], flow: str, tmp_path: Path
) -> None:
    log = tmp_path / "loads"
    job = join(flow, Numbers(SAMPLES, log=log), batch_size=10, name="mine", memory_bytes=8 << 20)
    assert sum(read(job, epoch) for epoch in range(2)) == 2 * SAMPLES
    own = {"flow": f"{flow}:v1"}

    def told() -> bool:
        scrape, loads = Scrape(cluster), len(log.read_text().split())
        job_has = scrape("dpflow_job_samples_total", job_name="mine", **own)
        # The second worker may come when the first has loaded all.
        return (
            job_has == 2 * SAMPLES
            and scrape("dpflow_shard_decodes_total", **own) == loads
            and scrape("dpflow_flow_workers", **own) == 2
            and scrape("dpflow_shard_sample_seconds_count", **own) == loads
        )

    wait(told, what="the job's samples and the workers' loads in the metrics")
    scrape = Scrape(cluster)
    decodes = scrape("dpflow_shard_decodes_total", **own)
    served = scrape("dpflow_shard_samples_delivered_total", **own)
    assert served >= 2 * SAMPLES
    assert scrape("dpflow_flow_decodes_per_sample", **own) == pytest.approx(decodes / served)
    assert scrape("dpflow_shard_wants_total", **own) >= 2 * SAMPLES
    assert scrape("dpflow_shard_hits_total", **own) <= scrape("dpflow_shard_wants_total", **own)
    assert scrape("dpflow_flow_hit_rate", **own) == pytest.approx(
        scrape("dpflow_shard_hits_total", **own) / scrape("dpflow_shard_wants_total", **own)
    )
    assert scrape("dpflow_job_batches_total", **own) == 18
    assert 0 < scrape("dpflow_job_stall_share", **own) <= 1
    assert scrape("dpflow_job_stall_seconds_total", **own) <= scrape("dpflow_job_reading_seconds_total", **own)
    # A sample is four numbers and its key, and what says so; on the way gaps come between them.
    assert scrape("dpflow_job_bytes_total", **own) >= 2 * SAMPLES * 16
    assert scrape("dpflow_job_bytes_total", **own) <= scrape("dpflow_shard_delivered_bytes_total", **own)
    assert scrape("dpflow_flow_jobs", **own) == scrape("dpflow_flow_shards", **own) == 1
    assert scrape("dpflow_flow_queue_depth", **own) == 0
    assert scrape("dpflow_shard_pool_capacity_bytes", **own) == 8 << 20
    assert scrape("dpflow_flow_state", state="accessed", **own) == 1
    assert scrape("dpflow_process_restarts_total", role="worker") == 0
    assert scrape("dpflow_shard_sample_seconds_bucket", le="+Inf", **own) == decodes
    stages = {one: scrape("dpflow_shard_stage_seconds_total", stage=one, **own) for one in STAGES}
    assert [one for one, took in stages.items() if took] == ["dataset", "hand-over"]
    assert scrape("dpflow_shard_sample_seconds_sum", **own) == pytest.approx(stages["dataset"])


def test_the_dashboard_for_grafana_names_only_metrics_that_there_are(cluster: CommandedCluster) -> None:
    families = Scrape(cluster).families.values()
    there = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    dashboard = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    named = {name for text in asked for name in re.findall(r"\bdpflow_\w+", text)}
    assert len(named) >= 15
    assert named - there == set()
    labels = {label for text in asked for label in re.findall(r"(\w+)=~", text)}
    assert labels == {"flow", "job_name"}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    cells = [(x + dx, y + dy) for x, y, w, h in places for dx in range(w) for dy in range(h)]
    assert len(cells) == len(set(cells)), "no panel lies over another"


def test_jobs_without_a_name_are_one_series_whose_counts_never_fall() -> None:
    unnamed = UnnamedJobs()

    def row(job: str, samples: int, flow: str = "images:v1") -> JobRow:
        return JobRow(flow=flow, job=job, stall_s=1.0, reading_s=2.0, batches=1, samples=samples, bytes=samples)

    def told(*rows: JobRow, flows: tuple[str, ...] = ("images:v1", "other:v1")) -> dict[tuple[str, str], int]:
        return {(one.flow, one.job): one.samples for one in unnamed.combine(rows, flows)}

    first, second, ranked = draw_name(), draw_name(), f"{draw_name()}/1"
    assert told(row("mine", 5), row(first, 10), row(second, 1)) == {
        ("images:v1", "mine"): 5,
        ("images:v1", "unnamed"): 11,
    }
    assert told(row(second, 2), row(ranked, 1)) == {("images:v1", "unnamed"): 13}
    assert told(row(ranked, 4), row(first, 7, "other:v1")) == {
        ("images:v1", "unnamed"): 16,
        ("other:v1", "unnamed"): 7,
    }
    assert told() == {("images:v1", "unnamed"): 16, ("other:v1", "unnamed"): 7}
    assert told(flows=("other:v1",)) == {("other:v1", "unnamed"): 7}, "a flow that was deleted is not kept"


def jittered(sample: Any) -> Any:
    values, key = sample
    return values + torch.rand(4), key


def test_what_is_drawn_on_top_of_what_is_kept_is_no_decode(
    cluster: CommandedCluster, join: Callable[..., SharedJob], flow: str, tmp_path: Path
) -> None:
    dataset = ALSDCache(Numbers(SAMPLES, log=tmp_path / "loads"), "64MiB", transform=jittered)
    job = join(flow, dataset, batch_size=10, workers=1)
    assert sum(read(job, epoch) for epoch in range(2)) == 2 * SAMPLES
    own = {"flow": f"{flow}:v1"}
    wait(
        lambda: Scrape(cluster)("dpflow_shard_samples_delivered_total", **own) >= 2 * SAMPLES,
        what="the samples in the metrics",
    )
    loads = len((tmp_path / "loads").read_text().split())
    assert Scrape(cluster)("dpflow_shard_decodes_total", **own) == loads == SAMPLES


def test_top_says_the_same_in_json(cluster: CommandedCluster, join: Callable[..., SharedJob], flow: str) -> None:
    job = join(flow, Numbers(SAMPLES), batch_size=10, name="mine")
    read(job, 0)

    def looked() -> dict[str, Any]:
        result = CliRunner().invoke(root, ["top", "--count", "1", "--json", "--address", cluster.address])
        figures: dict[str, Any] = json.loads(result.output)
        return {kind: next((row for row in rows if row["flow"] == f"{flow}:v1"), {}) for kind, rows in figures.items()}

    figures: dict[str, Any] = {}

    def is_all_told() -> bool:
        figures.update(looked())
        all_served = figures["jobs"].get("samples") == SAMPLES <= figures["shards"]["served"]
        return all_served and figures["flows"]["workers"] == 2

    wait(is_all_told, what="all samples, by the job and by its shard, and both workers")
    served = figures["shards"]["served"]
    assert figures["flows"]["served"] == served >= SAMPLES
    assert figures["flows"]["decodes_per_sample"] == figures["shards"]["decodes"] / served
    assert figures["flows"]["jobs"] == 1
    assert 0 < figures["jobs"]["stall_share"] <= 1
    assert figures["shards"]["keys"] == SAMPLES


def test_every_line_says_what_it_is_about_and_restarts_are_counted(
    cluster: CommandedCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    job = join(flow, Numbers(SAMPLES), batch_size=10, name="mine")
    read(job, 0)
    part = f"{flow}:v1/shard-000/worker-1"
    wait(lambda: cluster.process(part).status.get("up"), what="a worker that its shard knows")
    worker = cluster.process(part)
    os.kill(worker.pid, signal.SIGKILL)
    wait(
        lambda: Scrape(cluster)("dpflow_process_restarts_total", process=worker.id) == 1,
        what="the worker's restart in the metrics",
    )
    # The node and the shard each see the death by themselves, in either order.
    wait(
        lambda: "its samples are requeued" in cluster.log.read_text().rpartition("\n")[0],
        what="the shard's word of the worker's end",
    )
    lines = [json.loads(line) for line in cluster.log.read_text().rpartition("\n")[0].splitlines()]
    assert all({"time", "level", "flow", "shard", "worker", "job", "process", "pid"} <= line.keys() for line in lines)
    ended = [line for line in lines if line["level"] == "warning" and line["process"] == "node"]
    (text,) = [line["text"] for line in ended if line["flow"] == f"{flow}:v1"]
    # A fork server that is slow to say how the process ended is not waited for.
    end = r"(was ended by SIGKILL \(.*\)|has ended, exit code unknown)"
    assert re.fullmatch(f"process {worker.id} ended unexpectedly, restarting: pid {worker.pid} {end}", text)
    told = [line for line in lines if "its samples are requeued" in line["text"]]
    assert [(line["flow"], line["shard"], line["worker"], line["job"]) for line in told] == [
        (f"{flow}:v1", "shard-000", 1, None)
    ]


def test_metrics_are_there_again_after_the_coordinators_death(cluster: CommandedCluster) -> None:
    cluster.kill("coordinator")
    wait(lambda: answers(cluster), what="metrics")
