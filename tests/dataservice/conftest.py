"""A client of the pool, for tests of what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.dataservice.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow.dataservice import DataClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[DataClient]:
    """A client of a server in a thread."""
    with (
        inner_server(tmp_path / "p", 64 << 20),
        closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as client,
    ):
        yield client
