"""Reads a loader whose workers live shortly, and looks at how each is replaced."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.loader_cases import Counted
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.remote.fleet import remote_workers
from torch_dpflow.remote.fleet.worker_states import DrainWorker, WorkerState


class SlowCounted(Counted):
    """Takes a while too."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return super().__getitem__(index)


def record_drains(monkeypatch: pytest.MonkeyPatch) -> list[list[WorkerState]]:
    """At each drain from now on: the states of all workers that have the place of the one that drains."""
    drains: list[list[WorkerState]] = []
    obey = remote_workers.RemoteWorkers._obey

    def recorded(self: Any, instruction: Any) -> None:
        if isinstance(instruction, DrainWorker):
            number = self._fleet.get(instruction.name).number
            drains.append([one.state for one in self._fleet.workers if one.number == number])
        obey(self, instruction)

    monkeypatch.setattr(remote_workers.RemoteWorkers, "_obey", recorded)
    return drains


def read_through_rotation(
    remote: DPFlowDataLoader[Any],
    dataset: SlowCounted,
    drains: list[list[WorkerState]],
    *,
    replaced: int,
    for_s: float,
) -> None:
    """Read whole epochs for so long, in which so many are replaced at least; each sample is loaded once in each."""
    begun, read_epochs, samples = time.monotonic(), 0, len(dataset)
    while time.monotonic() - begun < for_s:
        seen = []
        for batch in remote:
            seen += map(int, batch)
            time.sleep(0.02)  # as a step of training does, which takes longer than loading
        assert sorted(seen) == [*range(samples)]
        read_epochs += 1
    loaded = dataset.loaded()
    assert {index: loaded.count(index) for index in range(samples)} == dict.fromkeys(range(samples), read_epochs)
    assert remote.stats().restarts == 0
    assert len(drains) >= replaced
    assert all(WorkerState.ON_DECK in states for states in drains), "a successor waits"
    stall = remote.stats().stall_share
    print(f"{read_epochs} epochs, {len(drains)} workers replaced, stall {stall:.3f}")
