"""Ten million samples, each once, through the deaths of the router and of the shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.control.lookaheads import MAX_WHOLE

SAMPLES, BATCH = 10_000_000, 4096


def numbers_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([number for _, number in samples])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_sample_comes_once_through_the_death_of_router_and_shard(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    assert SAMPLES > MAX_WHOLE  # shards know no whole order
    job = join(flow, Numbers(SAMPLES, width=1), batch_size=BATCH, workers=2, shards=1, collate_fn=numbers_of)
    counts = np.zeros(SAMPLES, np.uint8)
    victims = {SAMPLES // 3: "router", 2 * SAMPLES // 3: "shard-000"}
    read = 0
    for batch in job.traverse(0):
        np.add.at(counts, batch.numpy(), 1)
        read += len(batch)
        for place in [place for place in victims if place <= read]:
            killed = cluster.kill(f"{flow}:v1/{victims.pop(place)}")
            wait(lambda killed=killed: has_ended(killed), what="its end")
    assert not victims
    assert read == SAMPLES
    assert (counts == 1).all()
