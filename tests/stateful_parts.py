"""Datasets, samplers and iterators that keep a state of their own, and the workers that they are read with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

from tests.loader_cases import StatefulSampler

#: Samples of a dataset, or of a worker's share.
SIZE = 11
WORKERS: dict[str, dict[str, Any]] = {
    "in the process": {},
    "workers": {"num_workers": 2},
    "kept workers": {"num_workers": 2, "persistent_workers": True},
}


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class Noisy(Dataset):
    """Map-style: a sample depends on how many this copy has loaded before."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return 1000 * self.loaded + index

    def state_dict(self) -> dict[str, int]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["loaded"]


class OwnIterator(IterableDataset):
    """Is its own iterator; a new iteration begins where the last one has ended."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> int:
        if self.given and self.given % SIZE == 0:
            self.given += 1
            raise StopIteration
        self.given += 1
        info = get_worker_info()
        return self.given - 1 + (0 if info is None else 1000 * info.id)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Spanning(IterableDataset):
    """Counts its epochs, and its state spans them."""

    def __init__(self) -> None:
        self.epoch = self.given = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        own = 0 if info is None else 1000 * info.id
        while self.given < SIZE:
            self.given += 1
            yield 100 * self.epoch + self.given + own
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class Walk:
    """An iterator that knows where it is."""

    def __init__(self, begin: int) -> None:
        self.at = self.begin = begin

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> int:
        if self.at == self.begin + SIZE:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.begin, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin, self.at = state["begin"], state["at"]


class StatefulIterator(IterableDataset):
    """Keeps nothing; its iterators do."""

    def __iter__(self) -> Walk:
        info = get_worker_info()
        return Walk(0 if info is None else 1000 * info.id)


class Both(StatefulIterator):
    """Keeps which epoch it is, its iterator keeps where in it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Walk:
        self.epoch += 1
        walk = super().__iter__()
        return Walk(walk.begin + 100 * self.epoch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"] - 1  # the iteration that goes on from it counts it again


class WalkSampler(Sampler[int]):
    """Its iterators keep their state; their order follows a generator of the sampler's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> ShuffledWalk:
        return ShuffledWalk(self.generator)


class ShuffledWalk:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.begin(generator.get_state())

    def begin(self, state: torch.Tensor) -> None:
        self.state = state
        self.generator.set_state(state)
        self.order = torch.randperm(SIZE, generator=self.generator).tolist()
        self.given = 0

    def __iter__(self) -> ShuffledWalk:
        return self

    def __next__(self) -> int:
        if self.given == SIZE:
            raise StopIteration
        self.given += 1
        return int(self.order[self.given - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin(state["state"])
        self.given = state["given"]


class StatefulBatches(StatefulSampler):
    """A batch sampler with a state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BatchSampler(_Numbers(super().__iter__()), 3, drop_last=False))

    def __len__(self) -> int:
        return -(-self.size // 3)


class _Numbers(Sampler[int]):
    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return self.numbers
