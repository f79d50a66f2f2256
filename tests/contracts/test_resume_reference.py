"""torchdata's StatefulDataLoader is the reference: what it resumes exactly, this loader resumes exactly.

One undisturbed run of each case is saved at every point; then a loader that is made anew, by a script that begins
as the first did, goes on from each of the states. Exact means that it delivers the rest and all epochs after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.loader_cases import EagerSampler, Indices, LazySampler, StatefulSampler, Stream, seed_everything
from tests.stateful_parts import (
    SIZE,
    WORKERS,
    Both,
    Noisy,
    OwnIterator,
    Spanning,
    StatefulBatches,
    StatefulIterator,
    WalkSampler,
    plain,
)

EPOCHS = 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


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

Point = tuple[int, Any]


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
    ("sampler with a state", "kept workers"),
    ("sampler whose iterator has a state", "kept workers"),
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
