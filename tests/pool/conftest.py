"""A client of the pool, and a dataset, for tests of what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.datasets.samples_source import Numbered, publish
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.pool import DataClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[DataClient]:
    """A client of a server in a thread."""
    with (
        inner_server(tmp_path / "p", 64 << 20),
        closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as client,
    ):
        yield client


@pytest.fixture
def store(tmp_path: Path) -> DatasetStore:
    return DatasetStore.create(str(tmp_path / "datasets"))


@pytest.fixture
def stored(store: DatasetStore, request: pytest.FixtureRequest) -> StoredDataset:
    """A dataset of as many samples as the module of the test has as `COUNT`."""
    return publish(store, Numbered(request.module.COUNT))
