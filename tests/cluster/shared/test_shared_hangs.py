"""Samples whose loading never ends, and batches that take longer than the training loop would wait."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader_cases import patiently
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Hanging, Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.errors import LoaderTimeoutError, PoisonTaskError, WorkerStartError

Join = Callable[..., SharedJob]


def read(batches: Any) -> tuple[list[int], list[str]]:
    """The samples of all batches, and the errors in place of others."""
    seen: list[int] = []
    errors: list[str] = []
    while True:
        try:
            seen += [int(key) for key in next(batches)[1]]
        except StopIteration:
            return seen, errors
        except PoisonTaskError as error:
            errors.append(str(error))


def test_samples_that_hang_are_given_up_and_take_no_worker_with_them(join: Join, flow: str) -> None:
    dataset = Hanging(40, sleeps=5, holds=6)
    next(join(flow, dataset, workers=2, task_timeout_s=2.0).read([[0]], 0))
    # Patience is with a cluster that does not answer, and this one does.
    job = join(flow, dataset, workers=2, task_timeout_s=2.0, reconnect_timeout_s=5.0)
    seen, errors = read(job.read([[key] for key in range(40)], 0))
    assert seen == [key for key in range(40) if key not in (5, 6)]
    for key, error in zip((5, 6), errors, strict=True):
        assert f"sample {key}: loading it took down 3 workers" in error
        assert "3 of them by taking longer than task_timeout_s=2 s" in error
    assert read(job.read([[key] for key in range(7, 23)], 1)) == (list(range(7, 23)), [])


def end(worker: int) -> None:
    os._exit(5)


def hang(worker: int) -> None:
    time.sleep(10**6)


@pytest.mark.parametrize("worker_init_fn", [end, hang])
def test_workers_that_cannot_begin_are_told_of(join: Join, flow: str, worker_init_fn: Callable[[int], None]) -> None:
    job = join(flow, Numbers(8), workers=1, worker_init_fn=worker_init_fn, task_timeout_s=0.3)
    with pytest.raises(
        WorkerStartError, match=r"no worker for sample 0: \d workers ended.*while they .* ran worker_init_fn"
    ):
        next(job.read([[0]], 0))


class Gated(Numbers):
    """One sample is there only once a file is."""

    def __init__(self, size: int, gate: Path, *, gated: int) -> None:
        super().__init__(size)
        self.gate, self.gated = gate, gated

    def __getitem__(self, index: int) -> Any:
        while index == self.gated and not self.gate.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_that_is_late_is_told_of_and_comes_all_the_same(
    cluster: TestCluster, flow: str, tmp_path: Path, shuffle: bool
) -> None:
    gate = tmp_path / "gate"
    loader = DPFlowDataLoader(
        Gated(24, gate, gated=6),
        batch_size=4,
        shuffle=shuffle,
        num_workers=2,
        timeout=1,
        flow=flow,
        address=cluster.address,
        job=JobOptions(idle_s=3.0),
    )
    iterator, seen, said = iter(loader), [], ""
    while "it waits for" not in said:  # on a busy machine, its first samples may be requested later
        with pytest.raises(LoaderTimeoutError) as late:
            seen.extend(iterator)
        said = str(late.value)
    assert re.search(r"DataLoader timed out after 1 seconds; .* it waits for index \[\d+(, \d+)*\]", said)
    gate.touch()
    seen.extend(patiently(iterator))
    assert sorted(int(key) for _, keys in seen for key in keys) == list(range(24))
