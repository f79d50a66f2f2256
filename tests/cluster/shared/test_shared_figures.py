"""What users are told of how their jobs share a flow."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.shared_cluster import PATIENCE_S, TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions
from torch_dpflow.cli.main import root
from torch_dpflow.loader import trace


@pytest.mark.parametrize("keeps", [False, True])
def test_fast_jobs_one_after_the_other_hear_what_they_share(cluster: TestCluster, flow: str, keeps: bool) -> None:
    dataset: Any = ALSDCache(Numbers(200), "64MiB") if keeps else Numbers(200)

    def make() -> DPFlowDataLoader[Any]:
        options = JobOptions(idle_s=60.0)
        return DPFlowDataLoader(
            dataset,
            batch_size=10,
            shuffle=True,
            num_workers=2,
            flow=flow,
            address=cluster.address,
            job=options,
        )

    assert make().stats().sharing == ""
    for read in (1, 2):
        loader = make()
        assert len(list(loader)) == 20
        stats = loader.stats()
        assert stats.flow_served == 200 * read
        # Of the first job too; a sample that a second worker loaded may be counted later.
        assert stats.times.samples >= (200 if keeps else 200 * read)
        assert min(stats.times.dataset_s, stats.times.hand_over_s) > 0 == stats.times.collate_s
    assert stats.flow_decodes >= (200 if keeps else 400)
    assert ("dropped once they have it" in stats.sharing) is not keeps

    def status() -> str:
        told = CliRunner().invoke(root, ["status", "--address", cluster.address])
        return " ".join(told.output.split())

    # More than the job was told, where a second worker has loaded a sample too and its count came afterwards.
    told = re.compile(rf"{flow}:v1: jobs received 400 samples, for which (\d+) were loaded\.")

    def verdict() -> bool:
        """Whether the verdict is the right one; the router may report its jobs after the shards their samples."""
        text = status()
        found = told.search(text)
        if found is None or int(found[1]) < stats.flow_decodes:
            return False
        return text[found.end() :].startswith(" Little is shared: a sample goes") is not keeps

    wait(verdict, what="the samples that both jobs have received, and the verdict on them")


class Slow(Numbers):
    """A sample takes a while, as of a slow storage."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_a_job_that_waits_hears_what_limits_its_flow(
    cluster: TestCluster, flow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_TRACE", str(tmp_path / "trace.json"))
    loader: DPFlowDataLoader[Any] = DPFlowDataLoader(
        Slow(100_000),
        batch_size=2,
        num_workers=1,
        flow=flow,
        address=cluster.address,
        job=JobOptions(idle_s=3.0),
    )
    assert "too little was read" in loader.explain().meaning
    for _ in loader:
        if (told := loader.explain()).limited_by == "workers":
            break
    assert told.limited_by == "workers", told
    assert f"dpflow flow scale {flow} --workers" in told.change
    assert "samples, for which" in told.meaning
    file = trace._files.pop((os.getpid(), str(tmp_path / "trace.json")))
    assert file is not None
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    waits = [one for one in events if one["name"] == "wait"]
    assert len(waits) == loader.stats().batches
    assert {one["tid"] for one in events} == {trace.TRAINING}


def test_a_job_hears_what_its_flows_workers_have_taken_and_its_own_part(
    cluster: TestCluster, flow: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="torch_dpflow.loader")
    loaders: list[DPFlowDataLoader[Any]] = [
        DPFlowDataLoader(
            Slow(100_000),
            batch_size=2,
            num_workers=1,
            flow=flow,
            address=cluster.address,
            job=JobOptions(name=name, idle_s=3.0),
        )
        for name in ("one", "other")
    ]
    reading = [iter(loader) for loader in loaders]
    deadline = time.monotonic() + PATIENCE_S
    while any(loader.stats().worker_s < 0.5 for loader in loaders):
        assert time.monotonic() < deadline, [str(loader.stats()) for loader in loaders]
        for batches in reading:
            next(batches)
    one, other = (loader.stats() for loader in loaders)
    # Each is told once a second, at a time of its own.
    assert one.worker_s + other.worker_s <= max(one.flow_worker_s, other.flow_worker_s) + 0.01
    assert "s that the flow's workers have taken" in str(other)
    view = figures_of_flow(cluster, flow)
    assert view["worker_seconds"] >= other.flow_worker_s
    assert view["jobs"]["one"] >= one.worker_s
    for job in loaders[0]._runtime.jobs.values():
        job.close()
    (line,) = [text for text in caplog.messages if text.startswith(f"flow {flow!r}, job 'one' has ended: ")]
    assert "worker-seconds, of " in line


def figures_of_flow(cluster: TestCluster, flow: str) -> dict[str, Any]:
    """As `dpflow workers --json` tells them."""
    told = CliRunner().invoke(root, ["workers", "--json", "--address", cluster.address])
    return next(one for one in json.loads(told.output)["flows"] if one["flow"] == f"{flow}:v1")
