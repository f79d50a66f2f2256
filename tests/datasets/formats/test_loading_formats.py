"""Samples of opened datasets through loaders: shuffled, resumed, in flows, in the pool, and on remote workers."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.formats.tars import write_shards
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S, TestCluster
from torch_dpflow import DPFlowDataLoader, JobOptions, open_dataset
from torch_dpflow.pool import DataClient

#: Samples in three shards.
COUNT = 90

Samples = list[dict[str, Any]]


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """What is in the shards of `data`."""
    return write_shards(tmp_path / "data", 3, COUNT // 3)


def rows(batches: Any) -> Samples:
    """Split collated batches into their samples."""
    return [dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)]


def by_key(found: Samples) -> Samples:
    return sorted(found, key=lambda sample: str(sample["__key__"]))


def test_shuffled_and_resumed_in_mid_epoch_with_other_workers(tmp_path: Path, samples: Samples) -> None:
    def loader(workers: int) -> DPFlowDataLoader[Any]:
        dataset = open_dataset(tmp_path / "data")
        return DPFlowDataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)

    first = loader(2)
    iterator = iter(first)
    begun = rows(islice(iterator, 5))
    state = first.state_dict()
    second = loader(1)
    second.load_state_dict(state)
    rest = rows(second)
    assert begun + rest != samples
    assert by_key(begun + rest) == samples


def test_through_a_flow_on_a_cluster(tmp_path: Path, samples: Samples, common_cluster: TestCluster) -> None:
    job = JobOptions(idle_s=3.0)
    dataset = open_dataset(tmp_path / "data")
    loader = DPFlowDataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        flow="formats/shards",
        address=common_cluster.address,
        job=job,
    )
    assert by_key(rows(loader)) == samples


@pytest.mark.slow
def test_on_workers_that_are_started_elsewhere(tmp_path: Path, samples: Samples) -> None:
    dataset = open_dataset(tmp_path / "data")
    loader = DPFlowDataLoader(dataset, batch_size=8, shuffle=True, num_workers=1, platform="processes")
    assert by_key(rows(loader)) == samples


def test_through_the_pool(tmp_path: Path, samples: Samples) -> None:
    stored = open_dataset(tmp_path / "data").stored
    with (
        inner_server(tmp_path / "p", 64 << 20),
        closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as client,
        closing(open_dataset(tmp_path / "data", through=client.samples(stored))) as dataset,
    ):
        for _ in range(2):
            assert dataset.__getitems__(list(range(COUNT))) == samples
