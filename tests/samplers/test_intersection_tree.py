"""The intersection tree of DynaGCS: the thesis's contributions, pruning, and two readings of a round."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from benchmarks.simulation.dynagcs_letter import DynaGCSLetterGroup
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.buffered import Cells
from torch_dpflow.samplers.dynagcs_tree import IntersectionTree, speed_likeness

SIZE = 40


def tree_of(*sets: range, speeds: tuple[float | None, ...] = ()) -> IntersectionTree:
    cells = Cells(SIZE)
    for job, members in enumerate(sets):
        mask = np.zeros(SIZE, np.bool_)
        mask[members] = True
        cells.insert(job, mask)
    tree = IntersectionTree(cells, dict(enumerate(speeds)))
    for job in range(len(sets)):
        tree.insert(job)
    return tree


def test_a_small_tree_has_every_combination() -> None:
    tree = tree_of(range(20), range(10, 30), range(5, 40))
    assert {node for level in tree.nodes.values() for node in level} == set(range(1, 8))
    assert sorted(tree.jobs) == [0, 1, 2]
    top, *_, leaf = tree.with_job(2)
    assert (top, leaf) == (0b111, 0b100)


def test_the_contribution_is_what_is_shared_over_the_sizes_times_the_likeness_of_speeds() -> None:
    tree = tree_of(range(20), range(10, 30), range(5, 40), speeds=(1.0, 3.0, None))
    assert tree.contribution(0b001) == 1
    assert tree.contribution(0b011) == pytest.approx(10 / 40 * math.exp(-0.5))
    # The speed that is not known counts as the mean of the others, 2.
    assert tree.contribution(0b111) == pytest.approx(10 / 75 * math.exp(-math.sqrt((0.25 + 0.25) / 3)))


def test_speeds_that_are_alike_count_in_full() -> None:
    assert speed_likeness([2.0, 2.0, None]) == speed_likeness([None]) == 1
    assert 0 < speed_likeness([1.0, 100.0]) < speed_likeness([1.0, 2.0]) < 1


def test_each_level_keeps_the_best_nodes_and_no_more_than_there_are_jobs() -> None:
    sets = [range(4 * k, 4 * k + 20) for k in range(6)]
    tree = tree_of(*sets)
    for count, level in tree.nodes.items():
        assert len(level) <= 6
        assert level == sorted(level, key=tree.contribution, reverse=True)
        assert all(node.bit_count() == count for node in level)
    pairs = {1 << a | 1 << b for a, b in combinations(range(6), 2)}
    assert tree.contribution(tree.nodes[2][0]) == max(map(tree.contribution, pairs))
    assert sum(map(len, tree.nodes.values())) <= 36


def test_removing_a_job_shrinks_its_nodes_and_drops_those_of_one_job() -> None:
    tree = tree_of(range(20), range(10, 30), range(5, 40))
    tree.remove(1)
    assert {node for level in tree.nodes.values() for node in level} == {0b001, 0b100, 0b101}
    tree.remove(0)
    tree.remove(2)
    assert not tree.nodes


def test_a_round_to_the_letter_serves_jobs_without_room_and_goes_on_beyond_the_batch() -> None:
    group = DynaGCSLetterGroup(400)
    for job in ("a", "b", "c"):
        group.join(job, batch_size=8)
        group.start_epoch(job, 0)
    group.draw("a", 8)
    # Half a batch from each node with "a": all three jobs, two pairs, and "a" alone.
    assert len(group.lookahead("a").certain) == 4 * 4 - 8
    assert len(group.lookahead("b").certain) == 2 * 4


def test_the_other_reading_serves_jobs_with_room_until_the_batch_is_full() -> None:
    group = sampling_group("dynagcs", 400)
    for job in ("a", "b", "c"):
        group.join(job, batch_size=8)
        group.start_epoch(job, 0)
    first = group.next("a", 8)
    assert not len(group.lookahead("a").certain)
    buffers = [group.lookahead(job).certain for job in ("b", "c")]
    assert set(first[:4].tolist()) <= set(buffers[0].tolist()) & set(buffers[1].tolist())
    assert all(len(buffer) == 8 for buffer in buffers[:1])
    group.next("a", 8)
    assert len(group.lookahead("b").certain) == 8


def test_the_rest_of_the_set_is_announced_with_the_widest_shared_first() -> None:
    group = sampling_group("dynagcs", 60)
    group.join("a", range(40), batch_size=4)
    group.join("b", range(20, 60), batch_size=4)
    for job in ("a", "b"):
        group.start_epoch(job, 0)
    seen = group.lookahead("a")
    assert set(seen.likely[:20].tolist()) == set(range(20, 40))
    assert seen.weights.tolist() == [2.0] * 20 + [1.0] * 20
