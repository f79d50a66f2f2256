"""A cluster, and jobs that are closed at the test's end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.shared_cluster import TestCluster, open_job
from torch_dpflow.cluster.client.open_job import JobOptions, SharedJob

if TYPE_CHECKING:
    from tests.cluster.shared.function_cluster import FunctionCluster

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(common_cluster: TestCluster) -> TestCluster:
    return common_cluster


@pytest.fixture(scope="module")
def cluster_of_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster for the tests of one file."""
    started = TestCluster.start(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


@pytest.fixture(
    scope="module",
    params=["fc", *(pytest.param(platform, marks=pytest.mark.slow) for platform in ("lambda", "kubernetes"))],
)
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionCluster]:
    """A cluster for the tests of one file, whose workers are invocations of a function, or pods."""
    from tests.cluster.shared.function_cluster import function_cluster

    with function_cluster(request.param, tmp_path_factory) as started:
        yield started


@pytest.fixture
def flow() -> str:
    """The name of a flow that no other test has."""
    return f"test/{next(_numbers)}"


@pytest.fixture
def join(cluster: TestCluster) -> Iterator[Callable[..., SharedJob]]:
    """Open a job; options of `JobOptions` and of `open_job` alike."""
    jobs: list[SharedJob] = []

    def join(flow: str, dataset: Any, **given: Any) -> SharedJob:
        fields = {name: given.pop(name) for name in list(given) if name in JobOptions.__dataclass_fields__}
        options = JobOptions(**{"idle_s": 3.0, **fields})
        jobs.append(open_job(flow, dataset, address=cluster.address, options=options, **given))
        return jobs[-1]

    yield join
    for job in jobs:
        job.close()
        job.close()
