"""Loaders whose workers are on other hosts, what they load, and what their members are told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.loader_cases import Augmented
from tests.support.hosts import OnHosts
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.ipc.messages.remote_worker import LaunchSpec, decode_launch_spec
from torch_dpflow.remote.launchers.contract import AdoptingPlatform

#: In every sample, many times over.
MARK = b"<a sample, as it was loaded>"


class Marked(Augmented):
    """Draws from the global generators, takes a while, and can be recognised on a wire."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        super().__init__(size)
        self.seconds = seconds

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        time.sleep(self.seconds)
        return (*super().__getitem__(index), torch.frombuffer(bytearray(MARK * 40), dtype=torch.uint8))


@dataclass(frozen=True, kw_only=True)
class Recorded(OnHosts):
    """Keeps what its members are told."""

    orders: list[LaunchSpec] = field(default_factory=list)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        platform = super().open(outlived=outlived)
        start = platform.start

        def recorded(name: str, order: bytes) -> None:
            self.orders.append(decode_launch_spec(order))
            start(name, order)

        platform.start = recorded  # type: ignore[method-assign]
        return platform


def shuffled(dataset: Marked, workers: int, **options: Any) -> DPFlowDataLoader[Any]:
    """A loader that stays; equal arguments give equal batches."""
    return DPFlowDataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(7),
        num_workers=workers,
        persistent_workers=True,
        options=LoaderOptions(seeding="batch", restart_limit=1000),
        **options,
    )
