"""Workers that are killed: every sample arrives once, in order, and the user sees nothing of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.loader_cases import Augmented, Indices, Rows, StatefulStream, Stream, assert_same, seed_everything
from tests.worker_cases import kill, worker_pids
from torch_dpflow.options import LoaderOptions

KILL_EVERY = 50


def disturbed(loader: Any, every: int = KILL_EVERY, *, seed: int = 0) -> tuple[list[Any], int]:
    """All batches of an epoch in which a random worker is killed every so many; and how many were killed."""
    draw = random.Random(seed)
    batches, killed = [], 0
    for batch in loader:
        batches.append(batch)
        if len(batches) % every == 0 and (pids := worker_pids()):
            kill(draw.choice(pids))
            killed += 1
    return batches, killed


@pytest.mark.parametrize(("num_workers", "in_order"), [(1, True), (3, True), (3, False)])
def test_two_thousand_samples_with_a_kill_every_fifty_batches(OurLoader: Any, num_workers: int, in_order: bool) -> None:
    loader = OurLoader(Indices(2000), batch_size=4, num_workers=num_workers, in_order=in_order)
    batches, killed = disturbed(loader, seed=num_workers)
    seen = [int(index) for batch in batches for index in batch]
    assert killed >= 9
    assert sorted(seen) == list(range(2000))
    if in_order:
        assert seen == list(range(2000))
    assert loader.stats().restarts <= killed
    assert loader.stats().batches == 500
    assert loader.stats().samples == 2000


def augmented(loader_class: Any, **arguments: Any) -> Any:
    seed_everything(3)
    return loader_class(Augmented(300), batch_size=2, shuffle=True, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 1},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 3, "prefetch_factor": 8},
    ],
    ids=str,
)
def test_augmentation_is_the_same_after_kills(OurLoader: Any, arguments: dict[str, Any]) -> None:
    # torch draws a second epoch's order otherwise where workers are kept, so that is not varied.
    persistent = arguments.get("persistent_workers", False)
    undisturbed = augmented(OurLoader, num_workers=2, persistent_workers=persistent)
    expected = [list(undisturbed), list(undisturbed)]
    loader = augmented(OurLoader, **arguments)
    for epoch in expected:
        batches, killed = disturbed(loader, 20)
        assert killed >= 6
        assert_same(batches, epoch)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_workers_own_random_stream_is_the_same_after_kills(OurLoader: Any, num_workers: int) -> None:
    options = LoaderOptions(seeding="worker")
    expected = list(augmented(OurLoader, num_workers=num_workers, options=options))
    batches, killed = disturbed(augmented(OurLoader, num_workers=num_workers, options=options), 20)
    assert killed >= 6
    assert_same(batches, expected)


# Each kind with and without other workers beside the one that dies.
@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [("plain", 1), ("plain", 2), ("augmented", 1), ("augmented", 3), ("stateful", 1), ("stateful", 2)],
)
def test_a_stream_goes_on_where_its_worker_died(OurLoader: Any, kind: str, num_workers: int, tmp_path: Any) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "plain": lambda: Stream(300),
        "augmented": lambda: Stream(300, augment=True),
        "stateful": lambda: StatefulStream(300, str(tmp_path / "log")),
    }

    def loader() -> Any:
        seed_everything(3)
        return OurLoader(makers[kind](), batch_size=2, num_workers=num_workers)

    expected = list(loader())
    batches, killed = disturbed(loader(), 20)
    assert killed >= 6
    assert_same(batches, expected)


def test_large_batches_survive_the_worker_that_made_them(OurLoader: Any) -> None:
    """What a killed worker had put into shared memory is still there, or is made again."""
    rows = Rows(120, width=100_000)
    kept = []
    for indices, vectors, _words in OurLoader(rows, batch_size=2, num_workers=2):
        kept.append((int(indices[0]), vectors))
        if len(kept) % 10 == 0:
            for pid in worker_pids():
                kill(pid)
    assert [index for index, _ in kept] == list(range(0, 120, 2))
    for index, vectors in kept:
        assert_same(vectors[1], rows[index + 1][1])


def test_all_workers_at_once(OurLoader: Any) -> None:
    seen = []
    for batch in OurLoader(Indices(400), batch_size=2, num_workers=3):
        seen += batch.tolist()
        if len(seen) % 100 == 0:
            for pid in worker_pids():
                kill(pid)
    assert seen == list(range(400))


def test_before_the_first_batch(OurLoader: Any) -> None:
    iterator = iter(OurLoader(Indices(40), batch_size=2, num_workers=2))
    for pid in worker_pids():
        kill(pid)
    assert [int(index) for batch in iterator for index in batch] == list(range(40))


def test_between_epochs_of_persistent_workers(OurLoader: Any, eventually: Any) -> None:
    loader = OurLoader(Indices(40), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(4):
        assert [int(index) for batch in loader for index in batch] == list(range(40))
        victims = worker_pids()
        for pid in victims:
            kill(pid)
        eventually(lambda victims=victims: not set(victims) & set(worker_pids()), what="the kill")
    assert loader.stats().restarts >= 6


def test_kills_with_state_in_between(OurLoader: Any) -> None:
    """Killed, saved, resumed with another number of workers, killed again."""
    expected = list(augmented(OurLoader, num_workers=1))
    begun = augmented(OurLoader, num_workers=3)
    iterator = iter(begun)
    batches = []
    for number in range(60):
        if number % 20 == 10:
            kill(random.Random(number).choice(worker_pids()))
        batches.append(next(iterator))
    again = OurLoader(Augmented(300), batch_size=2, shuffle=True, num_workers=2)
    again.load_state_dict(begun.state_dict())
    del iterator
    rest, killed = disturbed(again, 20)
    assert killed >= 4
    assert_same(batches + rest, expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_under_other_start_methods(OurLoader: Any, method: str) -> None:
    expected = list(augmented(OurLoader, num_workers=2))
    batches, killed = disturbed(augmented(OurLoader, num_workers=2, multiprocessing_context=method), 50)
    assert killed >= 2
    assert_same(batches, expected)


@pytest.mark.slow
def test_a_kill_at_every_batch(OurLoader: Any) -> None:
    expected = list(augmented(OurLoader, num_workers=2))
    batches, killed = disturbed(augmented(OurLoader, num_workers=3), 1)
    assert killed > 100
    assert_same(batches, expected)
