"""Stores to work on, one on each kind of storage that needs no server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from torch_dpflow.datasets import DatasetStore

_names = itertools.count()


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
