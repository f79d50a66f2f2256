"""Datasets, samplers and comparisons that the loader's tests share.

They stand in a module of their own so that spawned workers can import them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

Pair = namedtuple("Pair", ["left", "right"])

#: `num_workers` and `persistent_workers`.
WORKERS = [(0, False), (1, True), (2, False), (2, True)]


class Rows(Dataset):
    """Row `i` is a function of `i` alone: an index, a float vector and a word."""

    def __init__(self, size: int, width: int = 3) -> None:
        self.size = size
        self.width = width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, str]:
        if not 0 <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        return index, torch.arange(self.width, dtype=torch.float32) / 7 + index, f"row-{index}"


class Indices(Dataset):
    """Item `i` is `i`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Indices):
    """Draws from the three global generators, a different number of times for each sample."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        for _ in range(index % 3):
            random.random()
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Unhurried(Augmented):
    """Takes a while, so that workers have something to do when something happens to them."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        time.sleep(0.01)
        return super().__getitem__(index)


class Counted(Indices):
    """Writes one byte to a file for every `__getitem__`, in whichever process it is called."""

    def __init__(self, size: int, log: str) -> None:
        super().__init__(size)
        self.log = log

    def __getitem__(self, index: int) -> int:
        with open(self.log, "ab") as log:
            log.write(b"%d\n" % index)
        return index

    def loaded(self) -> list[int]:
        """The indices asked for so far, in any process."""
        with open(self.log, "rb") as log:
            return [int(line) for line in log]


class WhoLoads(Indices):
    """Item `i` is (`i`, worker's number, its process id)."""

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        return index, -1 if info is None else info.id, os.getpid()


class Batched(Indices):
    """Has `__getitems__`; its items remember that it was used."""

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, "one"

    def __getitems__(self, indices: list[int]) -> list[tuple[int, str]]:
        return [(index, f"{len(indices)} at once") for index in indices]


class Samples(Dataset):
    """Any given objects."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Failing(Indices):
    """Raises what `errors` has for an index."""

    def __init__(self, size: int, errors: Mapping[int, BaseException]) -> None:
        super().__init__(size)
        self.errors = dict(errors)

    def __getitem__(self, index: int) -> int:
        if index in self.errors:
            raise self.errors[index]
        return index


class Messaged(Exception):
    """Has a `message`, and does not take it by keyword."""

    message = "kept here"

    def __init__(self, text: str) -> None:
        super().__init__(text)


class Deadly(Indices):
    """The process that loads `index` ends: by a signal, or by an exit code."""

    def __init__(self, size: int, index: int, *, by_signal: int = 0, by_exit: int = 0) -> None:
        super().__init__(size)
        self.index = index
        self.by_signal = by_signal
        self.by_exit = by_exit

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            if self.by_signal:
                os.kill(os.getpid(), self.by_signal)
                signal.pause()
            os._exit(self.by_exit)
        return index


class Gated(Indices):
    """Loading an index of `gates` blocks until its event is set."""

    def __init__(self, size: int, gates: Mapping[int, Any]) -> None:
        super().__init__(size)
        self.gates = dict(gates)

    def __getitem__(self, index: int) -> int:
        if index in self.gates:
            self.gates[index].wait()
        return index


class Announced(Gated):
    """Releases `begun` whenever the loading of an index of `gates` begins."""

    def __init__(self, size: int, gates: Mapping[int, Any], begun: Any) -> None:
        super().__init__(size, gates)
        self.begun = begun

    def __getitem__(self, index: int) -> int:
        if index in self.gates:
            self.begun.release()
        return super().__getitem__(index)


class Stream(IterableDataset):
    """`size` numbers, each worker a contiguous share; optionally with random draws."""

    def __init__(self, size: int, *, augment: bool = False, sized: bool = True) -> None:
        self.size = size
        self.augment = augment
        self.sized = sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("this stream does not know its length")
        return self.size

    def share(self) -> range:
        info = get_worker_info()
        if info is None:
            return range(self.size)
        return range(self.size * info.id // info.num_workers, self.size * (info.id + 1) // info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        for number in self.share():
            if self.augment:
                yield number, random.random(), float(np.random.rand()), float(torch.rand(()))
            else:
                yield number


class Uneven(IterableDataset):
    """Worker `i` yields `sizes[i]` numbers, marked with the worker."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        shares = range(len(self.sizes)) if info is None else [info.id]
        for share in shares:
            yield from range(1000 * share, 1000 * share + self.sizes[share])


class StatefulStream(Stream):
    """A stream that keeps its own position, and knows how many items it produced in this process."""

    def __init__(self, size: int, log: str) -> None:
        super().__init__(size)
        self.log = log
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        share = self.share()
        start, self.position = self.position, 0
        for offset in range(start, len(share)):
            with open(self.log, "ab") as log:
                log.write(b"%d\n" % share[offset])
            self.position = offset + 1
            yield share[offset]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def produced(self) -> list[int]:
        """The numbers produced so far, in any process."""
        with open(self.log, "rb") as log:
            return [int(line) for line in log]


class EagerSampler(Sampler[int]):
    """Draws its whole order from torch's global generator when `iter()` is called."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class LazySampler(EagerSampler):
    """Draws from torch's global generator at every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()))


class StatefulSampler(Sampler[int]):
    """Shuffles with a generator of its own and can be resumed by itself."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.seed = seed
        self.epoch = 0
        self.given = 0
        self.resumed_at: int | None = None

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        start, self.given = self.given, 0
        for offset in range(start, self.size):
            self.given = offset + 1
            yield order[offset]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]
        self.resumed_at = self.given


def assert_same(actual: Any, expected: Any, where: str = "it") -> None:
    """Equal in type, dtype, shape and every bit, through nested containers."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.layout == expected.layout, where
        assert actual.is_nested == expected.is_nested, where
        if expected.is_nested:
            assert_same(actual.unbind(), expected.unbind(), where)
            return
        assert actual.shape == expected.shape, where
        assert actual.is_quantized == expected.is_quantized, where
        if expected.is_quantized:
            assert actual.qscheme() == expected.qscheme(), where
            assert_same(actual.dequantize(), expected.dequantize(), where)
            actual, expected = actual.int_repr(), expected.int_repr()
        assert torch.equal(_bits(actual), _bits(expected)), f"{where}: {actual} instead of {expected}"
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype, where
        assert actual.shape == expected.shape, where
        np.testing.assert_array_equal(actual, expected)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes | bytearray | range):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items instead of {len(expected)}"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        assert actual == expected, f"{where}: {actual!r} instead of {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    dense = dense.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8) if dense.numel() else dense


def epochs(loader: Any, count: int = 2) -> list[list[Any]]:
    """All batches of so many epochs."""
    return [list(loader) for _ in range(count)]


def global_rng() -> tuple[bytes, object, bytes]:
    """The states of this process's three generators, to compare."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()


def seed_everything(seed: int) -> None:
    """Seed the three generators of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def patiently(batches: Iterator[Any]) -> Iterator[Any]:
    """All that come, under a `timeout` that a busy machine may exceed with any of them."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if "timed out after" not in str(error):
                raise
