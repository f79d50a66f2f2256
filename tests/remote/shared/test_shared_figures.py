"""What users are told of how their jobs share a flow."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from click.testing import CliRunner

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions
from torch_dpflow.cli.main import root


@pytest.mark.parametrize("keeps", [False, True])
def test_fast_jobs_one_after_the_other_hear_what_they_share(
    cluster: TestCluster, flow: str, keeps: bool
) -> None:
    dataset: Any = ALSDCache(Numbers(200), "64MiB") if keeps else Numbers(200)

    def make() -> DPFlowDataLoader[Any]:
        options = JobOptions(idle_s=60.0, patience_s=60.0)
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
    assert stats.flow_decodes >= (200 if keeps else 400)
    assert ("dropped once they have it" in stats.sharing) is not keeps

    def status() -> str:
        told = CliRunner().invoke(root, ["status", "--address", cluster.address])
        return " ".join(told.output.split())

    # More than the job was told, where a second worker has loaded a sample too and its count came afterwards.
    told = re.compile(rf"{flow}@1: jobs received 400 samples, for which (\d+) were loaded\.")

    def verdict() -> str | None:
        text = status()
        found = told.search(text)
        return text[found.end() :] if found and int(found[1]) >= stats.flow_decodes else None

    wait(verdict, what="the samples that both jobs have received")
    assert (verdict() or "").startswith(" Little is shared: a sample goes") is not keeps


class Slow(Numbers):
    """A sample takes a while, as of a slow storage."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_a_job_that_waits_hears_what_limits_its_flow(cluster: TestCluster, flow: str) -> None:
    loader: DPFlowDataLoader[Any] = DPFlowDataLoader(
        Slow(100_000),
        batch_size=2,
        num_workers=1,
        flow=flow,
        address=cluster.address,
        job=JobOptions(idle_s=3.0, patience_s=60.0),
    )
    assert "too little was read" in loader.explain().meaning
    for _ in loader:
        if (told := loader.explain()).limited_by == "workers":
            break
    assert told.limited_by == "workers", told
    assert f"dpflow flow scale {flow} --workers" in told.change
    assert "samples, for which" in told.meaning
