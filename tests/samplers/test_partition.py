"""Classes of samples: the coarsest partition of which every registered set is a union."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.samplers.shared_epoch import Partition, bitmap

SIZE = 20


def mask_of(members: frozenset[int]) -> bytes | None:
    return bitmap(np.array([*members]), SIZE)


def classes_of(partition: Partition) -> list[int]:
    labels = partition.of(np.arange(SIZE))
    return [0] * SIZE if labels is None else labels.tolist()


@settings(deadline=None, max_examples=150)
@given(
    sets=st.lists(st.frozensets(st.integers(0, SIZE - 1), min_size=1), max_size=6),
    gone=st.sets(st.integers(0, 5)),
    late=st.frozensets(st.integers(0, SIZE - 1), min_size=1),
)
def test_two_samples_are_in_one_class_if_the_same_sets_hold_them(
    sets: list[frozenset[int]], gone: set[int], late: frozenset[int]
) -> None:
    partition = Partition(SIZE)
    for members in sets:
        partition.register(mask_of(members))
    _check(partition, sets)
    for k in gone & set(range(len(sets))):
        partition.unregister(mask_of(sets[k]))
    if partition.register(mask_of(late)):
        _check(partition, [s for k, s in enumerate(sets) if k not in gone] + [late])
    assert partition.register(mask_of(late)) is False


def _check(partition: Partition, sets: list[frozenset[int]]) -> None:
    holders = [frozenset(k for k, members in enumerate(sets) if x in members) for x in range(SIZE)]
    classes = classes_of(partition)
    assert {(classes[x] == classes[y]) == (holders[x] == holders[y]) for x in range(SIZE) for y in range(x)} == {True}
    assert partition.count == len(set(holders))


def test_the_whole_set_splits_nothing() -> None:
    partition = Partition(SIZE)
    assert not partition.register(None)
    assert not partition.register(mask_of(frozenset(range(SIZE))))
    assert partition.of(np.arange(SIZE)) is None
    assert partition.register(mask_of(frozenset({3})))
    assert not partition.register(mask_of(frozenset({3})))
    assert partition.count == 2
