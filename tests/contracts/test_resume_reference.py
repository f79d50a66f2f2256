"""torchdata's StatefulDataLoader is the reference: what it resumes exactly, this loader resumes exactly.

One undisturbed run of each case is saved at every point; then a loader that is made anew, by a script that begins
as the first did, goes on from each of the states. Exact means that it delivers the rest and all epochs after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.loader_cases import EagerSampler, Indices, LazySampler, StatefulSampler, Stream, seed_everything
from torch_dpflow.errors import StateError

SIZE = 11
EPOCHS = 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


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


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"dataset": Indices(SIZE), "batch_size": 3},
    "shuffled": lambda: {"dataset": Indices(SIZE), "batch_size": 3, "shuffle": True},
    "shuffled by a generator": lambda: {
        "dataset": Indices(SIZE),
        "batch_size": 3,
        "shuffle": True,
        "generator": generator(),
    },
    "sampler that draws at once": lambda: {
        "dataset": Indices(SIZE),
        "batch_size": 3,
        "sampler": EagerSampler(SIZE),
    },
    "sampler that draws by and by": lambda: {
        "dataset": Indices(SIZE),
        "batch_size": 3,
        "sampler": LazySampler(SIZE),
    },
    "sampler with a state": lambda: {
        "dataset": Indices(SIZE),
        "batch_size": 3,
        "sampler": StatefulSampler(SIZE),
    },
    "sampler with a state, full batches": lambda: {
        "dataset": Indices(12),
        "batch_size": 3,
        "sampler": StatefulSampler(12),
    },
    "batch sampler with a state": lambda: {
        "dataset": Indices(SIZE),
        "batch_sampler": StatefulBatches(SIZE),
    },
    "sampler whose iterator has a state": lambda: {
        "dataset": Indices(SIZE),
        "batch_size": None,
        "sampler": WalkSampler(),
    },
    "map-style with a state": lambda: {
        "dataset": Noisy(),
        "batch_size": 3,
        "shuffle": True,
        "generator": generator(),
    },
    "stream": lambda: {"dataset": Stream(SIZE), "batch_size": 3},
    "shuffled data pipe": lambda: {
        "dataset": IterableWrapper(range(SIZE)).shuffle().sharding_filter(),
        "batch_size": 3,
        "shuffle": True,
    },
    "stream with a state": lambda: {"dataset": Spanning(), "batch_size": 3},
    "stream of whole batches": lambda: {"dataset": Spanning(), "batch_size": None},
    "stream without its short batch": lambda: {"dataset": Spanning(), "batch_size": 3, "drop_last": True},
    "stream that is its own iterator": lambda: {"dataset": OwnIterator(), "batch_size": 3},
    "stream whose iterator has a state": lambda: {"dataset": StatefulIterator(), "batch_size": 3},
    "stream with both": lambda: {"dataset": Both(), "batch_size": 3},
}
WORKERS: dict[str, dict[str, Any]] = {
    "in the process": {},
    "workers": {"num_workers": 2},
    "kept workers": {"num_workers": 2, "persistent_workers": True},
}

Point = tuple[int, Any]


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def undisturbed(make: Callable[[], Any]) -> tuple[list[list[Any]], dict[Point, Any]]:
    """The batches of some epochs, and the states by epoch and batches delivered; before and after all, too."""
    seed_everything(7)
    loader = make()
    states: dict[Point, Any] = {(0, "before"): loader.state_dict()}
    epochs = []
    for epoch in range(EPOCHS):
        iterator = iter(loader)
        states[epoch, 0] = loader.state_dict()
        batches: list[Any] = []
        for batch in iterator:
            batches += plain([batch])
            if len(batches) != 2:
                states[epoch, len(batches)] = loader.state_dict()
        epochs.append(batches)
        states[epoch, "after"] = loader.state_dict()
    return epochs, states


def goes_on(make: Callable[[], Any], state: Any, left: list[list[Any]]) -> bool:
    """Whether a loader that is made anew delivers what is left, in as many epochs."""
    seed_everything(7)
    loader = make()
    loader.load_state_dict(state)
    return [plain(loader) for _ in left] == left


def resumed_exactly(loader_class: Any, case: str, workers: str, points: list[Point]) -> dict[Point, bool]:
    def make() -> Any:
        return loader_class(**CASES[case](), **WORKERS[workers])

    epochs, states = undisturbed(make)
    exact = {}
    for epoch, at in points:
        if (epoch, at) not in states:
            continue
        left = [list(batches) for batches in epochs[epoch:]]
        left[0] = left[0][at:] if isinstance(at, int) else left[0]
        left = left[1:] if at == "after" else left
        exact[epoch, at] = goes_on(make, states[epoch, at], left)
    return exact


POINTS: list[Point] = [
    (0, "before"),
    (0, 0),
    (0, 1),
    (0, 3),
    (0, 4),
    (0, "after"),
    (1, 0),
    (1, 3),
    (1, "after"),
]
#: Where what is kept matters most with workers; the others are among the long tests.
QUICK = [
    ("sampler with a state", "workers"),
    ("sampler whose iterator has a state", "workers"),
    ("shuffled", "workers"),
    ("shuffled data pipe", "workers"),
    ("map-style with a state", "kept workers"),
    ("stream with a state", "workers"),
    ("stream with a state", "kept workers"),
    ("stream that is its own iterator", "kept workers"),
    ("stream with both", "kept workers"),
]


@pytest.mark.parametrize("case", CASES)
def test_in_the_process_it_goes_on_wherever_the_reference_does(OurLoader: Any, case: str) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    theirs = resumed_exactly(stateful.StatefulDataLoader, case, "in the process", POINTS)
    ours = resumed_exactly(OurLoader, case, "in the process", POINTS)
    assert {point for point in theirs if theirs[point]} <= {point for point in ours if ours[point]}
    assert [point for point in ours if not ours[point]] == []


@pytest.mark.parametrize(("case", "workers"), QUICK)
def test_with_workers_it_goes_on(OurLoader: Any, case: str, workers: str) -> None:
    points: list[Point] = [(0, 0), (1, 3), (1, "after")]
    ours = resumed_exactly(OurLoader, case, workers, points)
    assert [point for point in ours if not ours[point]] == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["workers", "kept workers"])
@pytest.mark.parametrize("case", CASES)
def test_with_workers_it_goes_on_wherever_the_reference_does(OurLoader: Any, case: str, workers: str) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    theirs = resumed_exactly(stateful.StatefulDataLoader, case, workers, POINTS)
    ours = resumed_exactly(OurLoader, case, workers, POINTS)
    assert {point for point in theirs if theirs[point]} <= {point for point in ours if ours[point]}
    assert [point for point in ours if not ours[point]] == []


@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_that_was_read_goes_back_to_where_it_was(OurLoader: Any, workers: str) -> None:
    """Over the same objects: before anything was asked for, and once an epoch has begun."""
    loader = OurLoader(OwnIterator(), batch_size=3, **WORKERS[workers])
    states = [loader.state_dict()]
    iterator = iter(loader)
    states.append(loader.state_dict())
    expected = plain(iterator)
    assert len(expected) == 4 * max(1, loader.num_workers)
    for state in states:
        loader.load_state_dict(state)
        assert plain(loader) == expected


def test_kept_workers_say_where_an_epoch_begins_whose_forerunner_was_left(OurLoader: Any) -> None:
    """How far they had read ahead nobody else knows."""

    def make() -> Any:
        return OurLoader(OwnIterator(), batch_size=3, **WORKERS["kept workers"])

    loader = make()
    next(iter(loader))
    iterator = iter(loader)
    states = [loader.state_dict()]
    next(iterator)
    states.append(loader.state_dict())
    rest = plain(iterator)
    for state in states:
        again = make()
        again.load_state_dict(state)
        assert plain(again)[-len(rest) :] == rest


def test_the_state_of_each_copy_needs_as_many_workers(OurLoader: Any) -> None:
    def make(num_workers: int) -> Any:
        return OurLoader(Noisy(), batch_size=3, num_workers=num_workers)

    loader = make(2)
    next(iter(loader))
    with pytest.raises(StateError, match="2 workers"):
        make(3).load_state_dict(loader.state_dict())


class Picky(Spanning):
    """Takes no state, or takes it and fails once it is iterated."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.spoilt = False

    def __iter__(self) -> Iterator[int]:
        if self.spoilt:
            raise KeyError("a shard that is gone")
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.when == "at once":
            raise KeyError("a shard that is gone")
        self.spoilt = True


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("when", ["at once", "once it is iterated"])
def test_a_dataset_that_cannot_take_its_state_says_so_at_iter(
    OurLoader: Any, workers: str, when: str
) -> None:
    loader = OurLoader(Picky(when), batch_size=3, **WORKERS[workers])
    iterator = iter(loader)
    batches = plain([next(iterator)])
    state = loader.state_dict()
    batches += plain(iterator)
    again = OurLoader(Picky(when), batch_size=3, **WORKERS[workers])
    for _ in range(2):  # the second time kept workers are there
        again.load_state_dict(state)
        with pytest.raises((StateError, KeyError), match="a shard that is gone"):
            iter(again)
        again.dataset.spoilt = False
        assert plain(again) == batches, "without the state, which is dropped"
        again.dataset.epoch = 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_cannot_take_its_state_says_so_at_iter(OurLoader: Any, num_workers: int) -> None:
    class Other(StatefulSampler):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("an epoch that never was")

    def make(sampler: type[StatefulSampler]) -> Any:
        return OurLoader(Indices(SIZE), batch_size=3, sampler=sampler(SIZE), num_workers=num_workers)

    loader = make(Other)
    iterator = iter(loader)
    batches = plain([next(iterator)])
    state = loader.state_dict()
    batches += plain(iterator)
    again = make(Other)
    again.load_state_dict(state)
    with pytest.raises(StateError, match="never was"):
        iter(again)
    assert plain(again) == batches
