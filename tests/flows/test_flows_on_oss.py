"""A flow gives the same samples from an object storage as from a disk, in workers too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.datasets.samples_source import Numbered, publish
from tests.flows.flow_cases import draw
from tests.support.oss_server import Fault, OSSServer
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader

COUNT = 23


@pytest.fixture
def oss() -> Iterator[OSSServer]:
    """A server with one bucket, reached by the vendor's client and by ours."""
    with OSSServer() as server:
        server.buckets.create("data")
        yield server
        fsspec.filesystem("oss", **server.storage_options())._session.session.close()


def _flow(**options: Any) -> DataLoadFlow:
    flow = DataLoadFlow("example/numbers", 1, **options).dataset("core/numbers", "v1", "train")
    flow.map_data("decode", lambda data: int(data.split(b"-")[0]), cache="always")
    return flow.map_target("number", lambda target: target["number"], cache="always").map_data("draw", draw)


def test_samples_are_those_of_a_disk(oss: OSSServer, tmp_path: Path) -> None:
    there = DatasetStore.create("oss://data/datasets", **oss.storage_options())
    here = DatasetStore.create(str(tmp_path))
    reads = []
    for store in (there, here):
        publish(store, Numbered(COUNT))
        reads.append(_flow().prepare_read(LocalDataLoadFlowReader(store, seed=5, check=True)))
    expected = [reads[1].to_mapped()[index] for index in range(COUNT)]
    assert [sample[1] for sample in expected] == list(range(COUNT))
    for workers in (0, 2):
        loader = reads[0].to_shuffled(4, collate_fn=list, num_workers=workers)
        assert sorted(sample for batch in loader for sample in batch) == sorted(expected)


def test_what_the_server_refuses_is_skipped_when_asked(oss: OSSServer) -> None:
    store = DatasetStore.create("oss://data/datasets", **oss.storage_options())
    publish(store, Numbered(8))
    read = _flow(on_error="skip").prepare_read(LocalDataLoadFlowReader(store))
    mapped = read.to_mapped()
    assert len(mapped.__getitems__([0])) == 1  # the metadata is there
    oss.faults.add(Fault.FORBIDDEN, key="datasets/core/numbers/data/v1/train/pack-1-0.bin")
    assert [number for _, number in mapped.__getitems__(list(range(8)))] == [0, 1, 2, 3]
    assert read.skipped() == {"read": 4}
