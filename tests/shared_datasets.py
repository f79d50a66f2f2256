"""Datasets that travel to the workers of a cluster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Numbers(Dataset[Any]):
    """Sample `i` is (a tensor of i, i); every load is noted in a file, if there is one."""

    def __init__(self, size: int, *, width: int = 4, log: Path | None = None) -> None:
        self.size, self.width, self.log = size, width, log

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.log is not None:
            with open(self.log, "a") as log:
                log.write(f"{index}\n")
        return torch.full((self.width,), float(index)), index


class Draws(Numbers):
    """Sample `i` is (i, what torch, random and numpy draw)."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.tensor([torch.rand(()).item(), random.random(), np.random.random()])


class Pictures(Numbers):
    """Sample `i` is an image of 3 x 160 x 150 whose pixels lie one after the other in memory."""

    def __getitem__(self, index: int) -> Any:
        values = (torch.arange(160 * 150 * 3) + index) % 251
        return values.to(torch.uint8).reshape(160, 150, 3).permute(2, 0, 1)


class Failing(Numbers):
    """One sample raises; one kills its worker."""

    def __init__(self, size: int, *, raises: int = -1, kills: int = -1) -> None:
        super().__init__(size)
        self.raises, self.kills = raises, kills

    def __getitem__(self, index: int) -> Any:
        if index == self.raises:
            raise LookupError(f"no such image: {index}")
        if index == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Hanging(Numbers):
    """Loading one sample never ends; nor does another, which holds on to the interpreter's lock meanwhile."""

    def __init__(self, size: int, *, sleeps: int = -1, holds: int = -1) -> None:
        super().__init__(size)
        self.sleeps, self.holds = sleeps, holds

    def __getitem__(self, index: int) -> Any:
        if index == self.sleeps:
            time.sleep(10**6)
        if index == self.holds:
            ctypes.PyDLL(None).sleep(10**6)
        return super().__getitem__(index)


class SlowNumbers(Numbers):
    """As `Numbers`, and every sample takes a while."""

    def __init__(self, size: int, cost_s: float) -> None:
        super().__init__(size)
        self.cost_s = cost_s

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.cost_s)
        return super().__getitem__(index)


class HeldUp(SlowNumbers):
    """As `SlowNumbers`; whoever finds a file `hang` in a folder removes it and hangs for ever."""

    def __init__(self, size: int, cost_s: float, folder: str) -> None:
        super().__init__(size, cost_s)
        self.file = os.path.join(folder, "hang")

    def __getitem__(self, index: int) -> Any:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file)
            time.sleep(10**6)
        return super().__getitem__(index)


def imported(folder: str, module: str) -> Any:
    sys.path.insert(0, folder)
    import_module(module)
    return Importing(folder, module)


class Importing(Numbers):
    """Workers import a module of a folder, which this process does not import."""

    def __init__(self, folder: str, module: str) -> None:
        super().__init__(8)
        self.where = folder, module

    def __reduce__(self) -> Any:
        return imported, self.where
