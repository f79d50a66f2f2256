"""A cluster for each test, which takes it apart, and a process that jobs are forked of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import Nursery
from tests.shared_cluster import TestCluster


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """What jobs are forked of."""
    started = Nursery()
    yield started
    started.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestCluster]:
    """A cluster of the test's own."""
    started = TestCluster.start(tmp_path)
    yield started
    started.stop()
