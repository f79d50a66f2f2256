"""A platform of processes that a test can hold up, and datasets for its workers, which import them from here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from tests.loader_cases import Stream
from tests.shared_cluster import wait
from torch_dpflow.remote.launchers.contract import Fate, Launcher, Ref
from torch_dpflow.remote.launchers.processes import Processes


@dataclass(frozen=True, kw_only=True)
class Troubled(Processes):
    """Processes that start, end and are announced to end when a test says so. Its other settings are `Limits`'."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    #: Raised by every start, if there is one.
    refusal: list[Exception] = field(default_factory=list)
    #: Workers of this number and of higher ones begin once that is set.
    held_from: int = 1
    opened: threading.Event = field(default_factory=threading.Event)
    #: Names of workers that are to end, and in how many seconds.
    warned: dict[str, float] = field(default_factory=dict)

    def launcher(self) -> Launcher:
        launcher = super().launcher()
        launcher.limits = replace(launcher.limits, **self.limits)
        start, look = launcher.start, launcher.look

        def held_start(name: str, order: bytes, *, deadline_s: float) -> Ref:
            if self.refusal:
                raise self.refusal[0]
            if number_of(name) >= self.held_from:
                self.opened.wait()
            return start(name, order, deadline_s=deadline_s)

        def warning_look(workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
            return {
                name: fate if fate.end else replace(fate, until_s=self.warned.get(name))
                for name, fate in look(workers).items()
            }

        launcher.start, launcher.look = held_start, warning_look  # type: ignore[method-assign]
        return launcher


def number_of(name: str) -> int:
    """The place of a worker with this name."""
    return int(name.split("-")[-2])


def names_of(loader: Any) -> dict[int, str]:
    """The workers that work for a loader, by their numbers."""
    workers = loader._iterator._shard.processes._fleet.workers
    return {worker.number: worker.name for worker in workers if worker.is_working}


def lose_one(loader: Any, pid_of_victim: Callable[[], int]) -> None:
    """Kill one of two workers once both work; one that does not yet is not missed.

    It waits until the loader knows, which is asked for the loss only as long as it reads: the other worker could have
    loaded all before.
    """
    wait(lambda: len(names_of(loader)) == 2, what="both workers")
    before = set(names_of(loader).values())
    os.kill(pid_of_victim(), signal.SIGKILL)
    wait(lambda: before - set(names_of(loader).values()), what="a worker's end")


class Watched(Dataset):
    """Item `i` is what a worker's code sees, and a draw. The files of a folder say what it does, and what was done."""

    label = "not set"

    def __init__(self, size: int, folder: Path, *, pace_s: float = 0.01, payload: int = 0) -> None:
        self.size = size
        self.folder = folder
        self.pace_s = pace_s
        self.payload = payload

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        self.note("loads", index)
        once = self.folder / f"once-{index}"
        if once.exists():
            once.unlink()
            time.sleep(3600)
        while (self.folder / f"hang-{index}").exists():
            time.sleep(0.01)
        time.sleep(self.pace_s)  # so that both workers get some
        return {
            "index": index,
            "worker": info.id,
            "of": info.num_workers,
            "seed": info.seed,
            "its own": info.dataset is self,
            "label": self.label,
            "draw": torch.rand(()),
            "payload": torch.zeros(self.payload),
        }

    def note(self, file: str, number: int) -> None:
        """Write a number and this process's id into a file."""
        with open(self.folder / file, "a") as log:
            log.write(f"{number} {os.getpid()}\n")

    def noted(self, file: str) -> list[tuple[int, int]]:
        """What was noted."""
        path = self.folder / file
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), int(pid)) for number, pid in map(str.split, lines)]


class PacedStream(Stream):
    """Takes a while for each number."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            time.sleep(0.05)
            yield sample


def label(worker: int) -> None:
    """A `worker_init_fn`."""
    info = get_worker_info()
    info.dataset.label = f"set by {worker}"
    info.dataset.note("inits", worker)
