"""The directory of the shared log against the plain rule, sample by sample."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.samplers import directory as module
from torch_dpflow.samplers.directory import Directory

SIZE = 30


def samples(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def directory(capacity: int, *, protected: int = 0, needed: int = 0) -> Directory:
    made = Directory(SIZE, capacity)
    made.protected = protected
    made.needed.extra[:] = needed
    return made


def load(target: Directory, *numbers: int) -> list[int]:
    target.load(samples(*numbers))
    return target.shrink().tolist()


def test_the_least_needed_go_first_and_the_oldest_among_equals() -> None:
    kept = directory(4, needed=2)
    kept.needed.extra[[3, 1]] = 1
    assert load(kept, 0, 1, 2, 3) == []
    assert load(kept, 4) == [1]
    assert load(kept, 5, 6) == [3, 0]


def test_the_latest_loads_are_spared_while_somebody_needs_them() -> None:
    kept = directory(4, protected=3, needed=5)
    assert load(kept, 0, 1, 2, 3) == []
    kept.needed.extra[[4, 5]] = 1
    assert load(kept, 4, 5) == [0, 1]
    kept.needed.extra[4] = 0
    assert load(kept, 6) == [4]


def test_what_nobody_needs_goes_at_once() -> None:
    kept = directory(4, protected=4, needed=1)
    load(kept, 0, 1, 2, 3)
    kept.needed.extra[[3, 2]] = 0
    kept.finished(samples(3, 1, 2))
    assert load(kept, 4, 5) == [3, 2]


def test_reading_anew_makes_a_resident_the_latest_load() -> None:
    kept = directory(3, needed=1)
    load(kept, 0, 1, 2)
    assert kept.load(samples(0, 3)).tolist() == [False, True]
    assert kept.shrink().tolist() == [1]
    assert kept.resident(samples(0, 1, 2, 3)).tolist() == [True, False, True, True]


def test_one_load_beyond_the_capacity_keeps_its_last_samples() -> None:
    kept = directory(3, protected=3, needed=1)
    assert load(kept, *range(10)) == list(range(7))
    assert np.flatnonzero(kept.resident(np.arange(SIZE))).tolist() == [7, 8, 9]


@settings(deadline=None, max_examples=100)
@given(
    capacity=st.integers(1, 12),
    protected=st.integers(0, 6),
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, SIZE - 1), max_size=8, unique=True),
            st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE),
        ),
        max_size=15,
    ),
)
def test_any_history_keeps_what_the_rule_says(
    capacity: int, protected: int, steps: list[tuple[list[int], list[int]]]
) -> None:
    kept = directory(capacity, protected=protected)
    loaded: dict[int, int] = {}
    count = 0
    for read, needed in steps:
        kept.needed.extra[:] = needed
        kept.needs_changed()
        absent = kept.load(samples(*read))
        assert absent.tolist() == [x not in loaded for x in read]
        for x in read:
            loaded[x] = count
            count += 1
        gone = set(kept.shrink().tolist())
        for victim in _victims(loaded, needed, count - protected, capacity):
            gone.remove(victim)
            del loaded[victim]
        assert not gone
        assert np.flatnonzero(kept.resident(np.arange(SIZE))).tolist() == sorted(loaded)
        kept = copy.deepcopy(kept)


def _victims(loaded: dict[int, int], needed: list[int], safe: int, capacity: int) -> list[int]:
    """Who goes, one after another: least needed, then oldest; the safe ones in the order of their loads."""
    excess = max(0, len(loaded) - capacity)
    free = sorted((x for x in loaded if loaded[x] < safe or not needed[x]), key=lambda x: (needed[x], loaded[x]))
    rest = sorted(loaded.keys() - set(free), key=loaded.__getitem__)
    return [*free, *rest][:excess]


@pytest.mark.parametrize("capacity", [200, 5000])
def test_a_large_directory_stays_within_its_capacity(capacity: int) -> None:
    rng = np.random.default_rng(0)
    kept = Directory(20_000, capacity)
    kept.needed.extra[:] = 3
    held: set[int] = set()
    for _ in range(60):
        read = rng.choice(20_000, 300, replace=False).astype(np.int32)
        held |= set(read.tolist())
        kept.load(read)
        kept.needed.extra[read] -= np.minimum(kept.needed.extra[read], rng.integers(0, 2, 300).astype(np.uint16))
        kept.finished(read)
        gone = kept.shrink().tolist()
        assert len(set(gone)) == len(gone)
        held -= set(gone)
        assert len(held) <= capacity
        assert set(np.flatnonzero(kept.resident(np.arange(20_000))).tolist()) == held
    assert len(held) == capacity


@pytest.mark.parametrize("reloads", [False, True])
def test_a_search_and_the_log_do_not_grow_with_the_loads(monkeypatch: pytest.MonkeyPatch, reloads: bool) -> None:
    monkeypatch.setattr(module, "_PIECE", 16)
    monkeypatch.setattr(module, "_SEARCHED", 32)
    rng, kept = np.random.default_rng(4), Directory(4000, 300)
    kept.needed.extra[:] = rng.integers(1, 4, 4000)
    kept.protected, searched, oldest = 50, [], kept._oldest

    def noted() -> tuple[np.ndarray, np.ndarray]:
        found = oldest()
        searched.append(len(found[0]))
        return found

    monkeypatch.setattr(kept, "_oldest", noted)
    for step in range(1500):
        among = 280 if reloads and step % 300 > 40 else 4000
        loaded = rng.choice(among, 8, replace=False).astype(np.int32)
        kept.load(loaded)
        gone = kept.shrink()
        assert not np.isin(gone, loaded).any()
        if step % 50 == 0:
            validate(kept)
        assert sum(len(piece[0]) for piece in kept._log) <= 4 * 300
    assert len(searched) > 100
    assert max(searched) <= 32 + 16 + 8
