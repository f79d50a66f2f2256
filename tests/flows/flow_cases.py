"""Datasets and functions that flows are made of in tests; at module level, so that they travel."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from torch_dpflow.flows import DataLoadFlow


class Numbers(Dataset[Any]):
    """Samples `(number as bytes, {"label": number % 3})`; counts what it is asked for."""

    def __init__(self, count: int = 12, broken: tuple[int, ...] = ()) -> None:
        self._count = count
        self._broken = broken
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, dict[str, int]]:
        self.asked.append(index)
        if index in self._broken:
            raise FileNotFoundError(f"object {index}")
        return b"%d" % index, {"label": index % 3}


class Batched(Numbers):
    """The same, which can read several samples together."""

    def __init__(self, count: int = 12) -> None:
        super().__init__(count)
        self.together: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.together.append(indices)
        return [self[index] for index in indices]


def draw(number: Any) -> tuple[Any, float, float, float]:
    """A random stage: a draw of each of the process's generators."""
    return number, torch.rand(()).item(), random.random(), float(np.random.rand())


def label_of(target: dict[str, int]) -> int:
    return target["label"]


def numbers_flow(samples: Any, **options: Any) -> DataLoadFlow:
    """Bytes to numbers, annotations to labels."""
    flow = DataLoadFlow("example/numbers", 1, **options)
    flow.dataset("core/numbers", "v1", "train", samples=samples)
    flow.map_data("decode", int, cache="always")
    return flow.map_target("label", label_of, cache="always")
