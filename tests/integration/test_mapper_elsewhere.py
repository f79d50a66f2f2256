"""Mappers whose workers are remote."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.remote.launchers.local_ray import needs_ray, ray_of, start_node
from torch_dpflow.remote import Ray

pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

from tests.node_cases import Counting
from torch_dpflow.nodes import Mapper


def check_kills(platform: Any, size: int) -> None:
    """A worker is killed, and later the mapper is left; another one goes on where it was."""
    sign = -1  # of a closure, which pickle alone could not send

    def with_process(item: tuple[int, int]) -> tuple[int, int, int]:
        return item[0], sign * item[1], os.getpid()

    got: list[Any] = []
    state = None
    pids = set()
    for workers, last in ((2, size // 2), (1, size)):
        node = Mapper(Counting(size), with_process, workers, platform=platform)
        node.reset(state)
        while len(got) < last:
            *result, pid = next(node)
            got.append(tuple(result))
            pids.add(pid)
            if len(got) == size // 6:
                os.kill(pid, signal.SIGKILL)
        state = node.state_dict()
        node.shutdown()
    assert got == [(0, -number) for number in range(size)]
    assert os.getpid() not in pids
    assert len(pids) >= 3


@pytest.mark.usefixtures("preloaded_workers")
def test_on_processes_that_connect_as_remote_workers_do() -> None:
    check_kills("processes", 60)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_of(start_node(2)) as started:
        yield started


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_on_ray() -> None:
    check_kills(Ray(cpus=0.1), 120)
