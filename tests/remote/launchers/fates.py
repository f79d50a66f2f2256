"""Waits for what a platform says of a worker."""

from __future__ import annotations

from collections.abc import Callable

from tests.shared_cluster import wait
from torch_dpflow.remote.launchers.contract import Fate, Launcher
from torch_dpflow.workers.platform import End


def fate_when(launcher: Launcher, name: str, holds: Callable[[Fate], object], what: str = "its fate") -> Fate:
    """Wait until a worker has such a fate."""
    fates: list[Fate] = []

    def look() -> bool:
        fates.append(launcher.look({name: name}).get(name, Fate()))
        return bool(holds(fates[-1]))

    wait(look, what=what)
    return fates[-1]


def end_of(launcher: Launcher, name: str) -> End:
    """Wait for the end of a worker."""
    end = fate_when(launcher, name, lambda fate: fate.end is not None, "its end").end
    assert end is not None
    return end
