"""Stores to work on, one on each kind of storage that needs no server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from torch_dpflow.datasets import DatasetStore
from torch_dpflow.datasets.spec import Dataset

_names = itertools.count()


@pytest.fixture(autouse=True)
def index_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of indexes and of rows, which is empty."""
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(tmp_path / "index"))
    monkeypatch.delenv("DPFLOW_STORE", raising=False)
    return tmp_path / "index"


@pytest.fixture(params=["file", "memory"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a directory that does not exist yet."""
    if request.param == "file":
        yield f"file://{tmp_path}/datasets"
        return
    url = f"memory://store-{next(_names)}/datasets"
    yield url
    filesystem, path = fsspec.url_to_fs(url)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


@pytest.fixture
def store(store_url: str) -> DatasetStore:
    """An empty store."""
    return DatasetStore.create(store_url)


@pytest.fixture
def local_store(tmp_path: Path) -> DatasetStore:
    """An empty store on disk."""
    return DatasetStore.create(str(tmp_path / "datasets"))


@pytest.fixture
def metadata_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the metadata shards that have been read and decoded."""
    reads: list[int] = []
    decode = Dataset.decode_shard

    def decode_and_note(dataset: Dataset, variant: str, number: int, data: bytes, **named: Any) -> Any:
        reads.append(number)
        return decode(dataset, variant, number, data, **named)

    monkeypatch.setattr(Dataset, "decode_shard", decode_and_note)
    return reads
