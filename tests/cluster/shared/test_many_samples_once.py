"""An epoch of ten million samples, each of which comes once, through the deaths of the router and of the shard.

Read are the first, the middle and the last samples of the epoch; a state takes those in between as read. That keeps all
tables at their size, and takes a sixth of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow._core.permutation import epoch_order
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.control.lookaheads import MAX_WHOLE

BATCH = 4096
SAMPLES, PART = 10_000_000, 140 * BATCH


def numbers_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([number for _, number in samples])


def digest_of(samples: np.ndarray[Any, Any]) -> str:
    read = np.zeros(SAMPLES, np.bool_)
    read[samples] = True
    return hashlib.blake2b(np.packbits(read).tobytes(), digest_size=16).hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_sample_comes_once_through_the_death_of_router_and_shard(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    assert SAMPLES > MAX_WHOLE  # shards know no whole order
    job = join(flow, Numbers(SAMPLES, width=1), batch_size=BATCH, workers=2, shards=1, collate_fn=numbers_of)
    order = epoch_order(SAMPLES, job.seed)[:]
    counts, state = np.zeros(SAMPLES, np.uint8), None
    for start in (0, BATCH * (SAMPLES // 2 // BATCH), SAMPLES - PART):
        if start:
            state = {**job.state(), "position": start, "digest": digest_of(order[:start])}
        victims = {start + PART // 3: "router", start + 2 * PART // 3: "shard-000"}
        read, reader = start, iter(job.traverse(0, done=state))
        while read < start + PART:
            batch = next(reader)
            np.add.at(counts, batch.numpy(), 1)
            read += len(batch)
            for place in [place for place in victims if place <= read]:
                killed = cluster.kill(f"{flow}:v1/{victims.pop(place)}")
                wait(lambda killed=killed: has_ended(killed), what="its end")
        assert not victims
        assert (counts[order[start:read]] == 1).all()
        saved = job.state()
        assert (saved["position"], saved["done"], saved["digest"]) == (read, None, digest_of(order[:read]))
    assert next(reader, None) is None
    assert read == SAMPLES
    assert counts.sum() == 3 * PART
