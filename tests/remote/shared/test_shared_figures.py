"""What users are told of how their jobs share a flow."""

from __future__ import annotations

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

    told = f"{flow}@1: jobs received 400 samples, for which {stats.flow_decodes} were loaded."
    wait(lambda: told in status())
    assert status().partition(told)[2].startswith(" Little is shared: a sample goes") is not keeps
