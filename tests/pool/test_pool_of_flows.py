"""The pool where stored datasets are named: in flows, and below a reader."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow import PooledDataset
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.errors import ChecksumError, OptionError, OptionTypeError
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader
from torch_dpflow.pool import DataClient

COUNT = 12


@pytest.fixture
def pool(tmp_path: Path, stored: StoredDataset, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The address of a server that holds the dataset, whose files are gone."""
    with inner_server(tmp_path / "p", 1 << 20):
        DataClient(tmp_path / "p", silence_s=PATIENCE_S).preload(stored)
        for pack in {stored.data_url(one).removeprefix("file://") for one in stored.samples()}:
            Path(pack).unlink()
        yield tmp_path / "p"


def samples_of(flow: DataLoadFlow, reader: LocalDataLoadFlowReader) -> list[Any]:
    mapped = flow.prepare_read(reader).to_mapped()
    samples = mapped.__getitems__([*range(COUNT)])
    mapped._samples._samples.close()
    return samples


def test_flows_read_what_they_name_in_the_pool(
    store: DatasetStore, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_POOL", str(pool))
    flow = DataLoadFlow("example/numbers", version=1).dataset("pool://core/numbers:v1:train")
    assert str(flow) == "Dataset(pool://core/numbers:v1:train)"
    assert samples_of(flow, LocalDataLoadFlowReader(store)) == numbers(COUNT)
    again = DataLoadFlow("example/numbers", version=1).dataset("pool://core/numbers", "v1", "train")
    assert again.source.is_same(flow.source)
    plain = DataLoadFlow("example/numbers", version=1).dataset("core/numbers:v1:train")
    assert not plain.source.is_same(flow.source)
    with pytest.raises(OptionError, match="leave out one of the two"):
        flow.dataset("pool://core/numbers", samples=[1])


def test_a_flows_reader_is_told_of_the_pool(store: DatasetStore, pool: Path) -> None:
    flow = DataLoadFlow("example/numbers", version=1).dataset("core/numbers:v1:train")
    assert samples_of(flow, LocalDataLoadFlowReader(store, pool=pool)) == numbers(COUNT)


def test_a_reader_reads_through_the_pool(stored: StoredDataset, pool: Path) -> None:
    client = DataClient(pool, silence_s=PATIENCE_S)
    with closing(DatasetReader(stored, through=client.samples(stored))) as reader:
        assert reader.read_each(range(COUNT)) == numbers(COUNT)
        with closing(pickle.loads(pickle.dumps(reader))) as copy:
            assert copy.read_each(range(COUNT)) == numbers(COUNT)
    with closing(pickle.loads(pickle.dumps(PooledDataset(stored, pool)))) as copy:
        assert copy.read_each(range(COUNT)) == numbers(COUNT)
        assert (copy.hits, copy.misses) == (COUNT, 0)


def test_memory_of_the_pool_without_a_copy(stored: StoredDataset, pool: Path) -> None:
    with closing(PooledDataset(stored, pool, copy=False, check=True, silence_s=PATIENCE_S)) as dataset:
        samples = dataset.read_each(range(COUNT))
        DataClient(pool, silence_s=PATIENCE_S).unload(stored)
    assert [(bytes(content), fields) for content, fields in samples] == numbers(COUNT)
    assert all(type(content) is memoryview and content.readonly for content, _ in samples)


def test_what_a_reader_cannot_read_through_is_refused(stored: StoredDataset, store: DatasetStore, pool: Path) -> None:
    others = publish(store, Numbered(3), name="core/others")
    client = DataClient(pool, silence_s=PATIENCE_S)
    for wrong in (3, client):
        with pytest.raises(OptionTypeError, match=r"through=.*; give the result of DataClient.samples"):
            DatasetReader(stored, through=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="samples of a dataset other than core/numbers:v1:train"):
        DatasetReader(stored, through=client.samples(others))


class Altered:
    """Gives other bytes than the storage has."""

    def read(self, numbers: Sequence[int], lengths: Sequence[int | None]) -> list[bytes | None]:
        return [b"x" * length if length and number % 2 else None for number, length in zip(numbers, lengths)]

    def is_of(self, stored: StoredDataset) -> bool:
        return True

    def close(self) -> None:
        pass


def test_what_lies_nearer_is_compared_with_its_checksum_on_demand(stored: StoredDataset) -> None:
    expected = numbers(COUNT)
    with closing(DatasetReader(stored, through=Altered())) as reader:
        found = reader.read_each(range(COUNT))
        assert found[::2] == expected[::2]
        assert [one[0] for one in found[1::2]] == [b"x" * len(one[0]) for one in expected[1::2]]
    with closing(DatasetReader(stored, through=Altered(), check=True)) as reader:
        found = reader.read_each(range(COUNT))
        assert found[::2] == expected[::2]
        assert all(isinstance(one, ChecksumError) for one in found[1::2])
