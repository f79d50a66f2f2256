"""A cluster for each test, which takes it apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared_cluster import TestCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestCluster]:
    """A cluster of the test's own."""
    started = TestCluster.start(tmp_path)
    yield started
    started.stop()
