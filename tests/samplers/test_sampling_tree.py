"""The dependent sampling tree: JOADER's theorems, and insertion and deletion against plain sets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import validate
from tests.later import Later
from torch_dpflow.errors import OptionError
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.buffered import MAX_JOBS, Cells, bits_of, free_bit
from torch_dpflow.samplers.joader import sample_round

stats = Later("scipy.stats")
SIZE = 24


def mask_of(members: set[int] | frozenset[int] | range, size: int = SIZE) -> np.ndarray:
    mask = np.zeros(size, np.bool_)
    mask[list(members)] = True
    return mask


def cells_of(*sets: set[int] | range) -> Cells:
    cells = Cells(SIZE)
    for job, members in enumerate(sets):
        cells.insert(job, mask_of(members))
    return cells


def needs_of(cells: Cells) -> dict[int, set[int]]:
    """What each job needs, put together from the cells."""
    needs: dict[int, set[int]] = {}
    for mask, samples in cells.items():
        for job in bits_of(mask):
            needs.setdefault(job, set()).update(samples.tolist())
    return needs


subsets = st.frozensets(st.integers(0, SIZE - 1), min_size=1)


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.none() | subsets, st.integers(0, 9)), max_size=20),
    seed=st.integers(0, 99),
)
def test_any_history_of_insertions_deletions_and_rounds_keeps_the_sets(
    steps: list[tuple[int, frozenset[int] | None, int]], seed: int
) -> None:
    cells, rng = Cells(SIZE), np.random.default_rng(seed)
    truth: dict[int, set[int]] = {}
    for job, members, rounds in steps:
        cells.delete(job)
        truth.pop(job, None)
        if members is not None:
            cells.insert(job, mask_of(members))
            truth[job] = set(members)
        for _ in range(rounds):
            taking = [j for j, left in truth.items() if left and (j + rounds) % 3]
            if taking:
                for reader, sample in sample_round(cells, taking, rng).items():
                    truth[reader].remove(sample)
        assert needs_of(cells) == {j: left for j, left in truth.items() if left}
        assert all(cells.needed[j] == len(truth.get(j, ())) for j in range(6))
        assert len({mask for mask, _ in cells.items()}) == sum(1 for _ in cells.items())


@pytest.mark.parametrize(
    "sets",
    [(range(12), range(6, 24)), (range(8), range(24), range(4, 20)), (range(6), range(6, 14), range(3, 24))],
    ids=["two jobs", "nested", "chain"],
)
def test_each_job_for_itself_draws_uniformly(sets: tuple[range, ...]) -> None:
    rng, rounds = np.random.default_rng(1), 4000
    counts = [Counter[int]() for _ in sets]
    for _ in range(rounds):
        for job, sample in sample_round(cells_of(*sets), range(len(sets)), rng).items():
            counts[job][sample] += 1
    for members, count in zip(sets, counts):
        assert set(count) == set(members)
        assert stats.chisquare([count[x] for x in members]).pvalue > 1e-3


def test_two_draws_coincide_as_often_as_can_be() -> None:
    """Theorem 1: with probability |intersection| / |larger set|."""
    small, large = range(12), range(4, 24)
    rng, rounds = np.random.default_rng(2), 4000
    same = 0
    for _ in range(rounds):
        drawn = sample_round(cells_of(small, large), [0, 1], rng)
        same += drawn[0] == drawn[1]
    assert stats.binomtest(same, rounds, 8 / 20).pvalue > 1e-3


def test_equal_sets_always_draw_the_same_and_disjoint_ones_never() -> None:
    rng = np.random.default_rng(3)
    equal = cells_of(range(20), range(20), range(20))
    apart = cells_of(range(10), range(10, 24))
    for _ in range(10):
        assert len(set(sample_round(equal, [0, 1, 2], rng).values())) == 1
        assert len(set(sample_round(apart, [0, 1], rng).values())) == 2


def test_a_job_that_sits_out_loses_nothing() -> None:
    cells = cells_of(range(20), range(20), range(20))
    for _ in range(20):
        sample_round(cells, [0, 2], np.random.default_rng(4))
    assert needs_of(cells) == {1: set(range(20))}


@pytest.mark.parametrize("jobs", [3, 9], ids=["few cells", "hundreds of cells"])
def test_what_some_jobs_need_is_found_among_any_number_of_cells(jobs: int) -> None:
    rng = np.random.default_rng(5)
    cells, sets = Cells(2000), [rng.random(2000) < 0.5 for _ in range(jobs)]
    for job, members in enumerate(sets):
        cells.insert(job, members)
    everyone = (1 << jobs) - 1
    for _ in range(50):
        wanted = int(rng.integers(1, everyone + 1))
        more = int(rng.choice([0, wanted | 1, everyone]))
        found = np.ones(2000, np.bool_)
        for job in bits_of(wanted):
            found &= sets[job]
        if more:
            found &= ~np.logical_and.reduce([sets[job] for job in bits_of(more)])
        assert cells.samples_in(cells.needed_by(wanted, more)) == np.count_nonzero(found)
        sample_round(cells, range(jobs), rng)
        validate(cells)
        sets = [mask_of(needs_of(cells).get(job, set()), 2000) for job in range(jobs)]


def test_there_is_a_limit_to_the_jobs_and_leaving_frees_a_place() -> None:
    assert free_bit([0, 2]) == 1
    for strategy, limit in (("dynagcs", 64), ("joader", MAX_JOBS)):
        group = sampling_group(strategy, 4)
        for k in range(limit):
            group.join(f"job-{k}")
        with pytest.raises(OptionError, match=f"{limit} jobs"):
            group.join("one too many")
        assert len(group.jobs) == limit
    group.leave("job-7")
    group.join("another")


def test_more_jobs_than_a_word_has_bits_read_each_sample_once() -> None:
    rng = np.random.default_rng(5)
    group, sets = sampling_group("joader", 100), {}
    for number in range(80):
        sets[str(number)] = np.sort(rng.choice(100, 20, replace=False))
        group.join(str(number), sets[str(number)], seed=number)
        group.start_epoch(str(number), 0)
    read: dict[str, list[int]] = {name: [] for name in sets}
    while any(group.remaining(name) for name in sets):
        for name in sets:
            read[name] += group.next(name, 16).tolist()
    validate(group)
    assert all(sorted(read[name]) == sets[name].tolist() for name in sets)


def test_jobs_in_step_share_every_draw() -> None:
    group = sampling_group("joader", 40)
    for job in ("a", "b", "c"):
        group.join(job, batch_size=4)
        group.start_epoch(job, 0)
    while group.remaining("a"):
        batches = [group.next(job, 4).tolist() for job in ("a", "b", "c")]
        assert batches[0] == batches[1] == batches[2]
