"""Another number of ranks in mid-epoch: every sample once, whatever was read before, and by how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow import DPFlowDataLoader, DynaGCSSampler
from torch_dpflow._core import dealing
from torch_dpflow.errors import StateError
from torch_dpflow.samplers import BudgetBatchSampler, MixtureSampler, sampling_group

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def samplers(length: int, replicas: int, **options: Any) -> list[DynaGCSSampler]:
    return [DynaGCSSampler(data(length), num_replicas=replicas, rank=rank, **options) for rank in range(replicas)]


def data(length: int) -> Any:
    """A dataset of this length, without a list of indices."""
    return np.empty((length, 0))


def read(ranks: list[DynaGCSSampler], steps: list[int] | None = None) -> list[list[int]]:
    """What each rank yields, of so many samples at most."""
    parts = []
    for rank, sampler in enumerate(ranks):
        iterator = iter(sampler)
        parts.append([index for _, index in zip(range(10**6 if steps is None else steps[rank]), iterator)])
    return parts


def check_epoch(length: int, before: Any, last: list[Any], *, drop_last: bool, dealt_before: bool = False) -> None:
    """The parts read before a change of size are distinct; the last size evens out what they left.

    dealt_before: the size has not changed, so that the padding comes from the beginning of all that was dealt.
    """
    before, together = np.asarray(before, np.int64), np.concatenate([np.asarray(part, np.int64) for part in last])
    assert len(np.unique(before)) == len(before), "a sample was read twice"
    left = np.setdiff1d(np.arange(length), before)
    assert len({len(part) for part in last}) == 1
    if drop_last:
        assert len(left) - len(together) == len(left) % len(last)
        assert len(np.unique(together)) == len(together)
        assert np.isin(together, left).all()
        return
    assert len(together) - len(left) == -len(left) % len(last)
    if dealt_before:
        assert np.isin(left, together).all()
    else:
        assert np.array_equal(np.unique(together), left)
        counts = np.unique(together, return_counts=True)[1]
        assert max(counts, default=0) - min(counts, default=0) <= 1, "padding repeats each sample as often as others"


def dealt(places: dealing.Places, rank: int, replicas: int, *, drop_last: bool) -> Any:
    return dealing.numbers(dealing.RankPart(places, rank, replicas, drop_last=drop_last)[:])


@settings(max_examples=200)
@given(
    length=st.integers(0, 10_000),
    sizes=SIZES,
    last=st.integers(1, 12),
    drop_last=st.booleans(),
    drawn=st.data(),
)
def test_places_read_by_changing_numbers_of_ranks_are_those_of_the_epoch(
    length: int, sizes: list[int], last: int, drop_last: bool, drawn: st.DataObject
) -> None:
    """Ranks in step, or out of it by some samples; all that they do is arithmetic."""
    state: Any = dealing.RankPosition.beginning(length).as_dict(0, 1)
    before = list[Any]()
    for replicas in sizes:
        at = dealing.RankPosition.restored(state, length, replicas, drop_last=drop_last)
        # An epoch that has ended is over at any size, so each size leaves something.
        limit = max(0, dealing.count(at.places) // replicas - 1 - (at.position - at.dealt_at))
        step, lag = drawn.draw(st.integers(0, limit)), drawn.draw(st.integers(0, 2))
        reached = [max(at.position, at.position + step - lag * (rank % 2)) for rank in range(replicas)]
        for rank, position in enumerate(reached):
            part = dealt(at.places, rank, replicas, drop_last=drop_last)
            before.append(part[at.position - at.dealt_at : position - at.dealt_at])
        state = [
            dealing.RankPosition(position, at.dealt_at, at.places).as_dict(rank, replicas)
            for rank, position in enumerate(reached)
        ]
        if len(set(reached)) == 1:
            state = drawn.draw(st.sampled_from(state))
    at = dealing.RankPosition.restored(state, length, last, drop_last=drop_last)
    assert len(at.places) <= 1 + sum(sizes), "its size depends on ranks that were out of step, and not on the epoch"
    parts = [dealt(at.places, rank, last, drop_last=drop_last) for rank in range(last)]
    parts = [part[at.position - at.dealt_at :] for part in parts]
    read_before = np.concatenate(before)
    if len(read_before) < length or not length:
        same = at.position != at.dealt_at
        check_epoch(length, read_before, parts, drop_last=drop_last, dealt_before=same)


@settings(max_examples=60)
@given(
    length=st.integers(0, 500),
    sizes=SIZES,
    last=st.integers(1, 12),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    drawn=st.data(),
)
def test_an_epoch_read_by_changing_numbers_of_ranks_is_the_epoch(
    length: int, sizes: list[int], last: int, drop_last: bool, seed: int, drawn: st.DataObject
) -> None:
    """Ranks in step: the state of any one of them is enough."""
    epoch, state, before = drawn.draw(st.integers(0, 3)), None, list[int]()
    for replicas in sizes:
        ranks = samplers(length, replicas, drop_last=drop_last, seed=seed)
        for sampler in ranks:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
        step = drawn.draw(st.integers(0, max(0, (length - len(before)) // replicas - 1)))
        # Where a size leaves nothing to read, an iteration would begin another epoch.
        before += [index for part in read(ranks, [step] * replicas) for index in part] if step else []
        state = drawn.draw(st.sampled_from(ranks)).state_dict()
    ranks = samplers(length, last, drop_last=drop_last, seed=seed)
    assert state is not None
    for sampler in ranks:
        sampler.load_state_dict(state)
        assert sampler.epoch == epoch
    parts = [[index for _, index in zip(range(sampler.samples_left), iter(sampler))] for sampler in ranks]
    if len(before) < length and not (drop_last and length - len(before) < last):
        check_epoch(length, before, parts, drop_last=drop_last, dealt_before=last == sizes[-1])
    for rank, sampler in enumerate(ranks):
        sampler.set_epoch(epoch + 1)
        new = DynaGCSSampler(data(length), num_replicas=last, rank=rank, drop_last=drop_last, seed=seed)
        new.set_epoch(epoch + 1)
        assert list(sampler) == list(new), "the next epoch is that of a run that began at this size"


@settings(max_examples=60)
@given(
    length=st.integers(1, 300),
    replicas=st.integers(1, 9),
    last=st.integers(1, 9),
    drop_last=st.booleans(),
    drawn=st.data(),
)
def test_states_of_ranks_out_of_step_are_merged(
    length: int, replicas: int, last: int, drop_last: bool, drawn: st.DataObject
) -> None:
    ranks = samplers(length, replicas, drop_last=drop_last)
    steps = drawn.draw(st.lists(st.integers(0, max(0, length // replicas - 1)), min_size=replicas, max_size=replicas))
    before = [index for part in read(ranks, steps) for index in part]
    states = [sampler.state_dict() for sampler in ranks]
    resumed = samplers(length, last, drop_last=drop_last)
    for sampler in resumed:
        sampler.load_state_dict(states)
    parts = [[index for _, index in zip(range(sampler.samples_left), iter(sampler))] for sampler in resumed]
    if len(before) < length and not (drop_last and length - len(before) < last):
        in_step = last == replicas and len(set(steps)) == 1
        check_epoch(length, before, parts, drop_last=drop_last, dealt_before=in_step)
    if not drop_last and len(set(steps)) > 1:
        behind = {index for rank in range(replicas) for index in expected(ranks, rank)[steps[rank] : max(steps)]}
        first = [index for column in zip(*parts) for index in column][: len(behind)]
        assert set(first) == behind, "what the slower ranks had not read comes first"


def expected(ranks: list[DynaGCSSampler], rank: int) -> list[int]:
    new = DynaGCSSampler(data(ranks[rank].size), num_replicas=len(ranks), rank=rank, drop_last=ranks[rank].drop_last)
    return list(new)


def test_eight_ranks_become_three_then_five_then_one() -> None:
    state, before = None, list[int]()
    for replicas, step in ((8, 40), (3, 100), (5, 50)):
        ranks = samplers(1000, replicas, seed=3)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        before += [index for part in read(ranks, [step] * replicas) for index in part]
        state = ranks[-1].state_dict()
    assert state is not None
    assert state["places"] == [[620, 1000, 1]], "one range, after any number of changes"
    alone = DynaGCSSampler(data(1000), seed=3)
    alone.load_state_dict(state)
    rest = list(alone)
    assert sorted(before + rest) == list(range(1000))
    assert sorted(alone) == list(range(1000))
    assert alone.epoch == 1


def test_an_epoch_that_has_ended_stays_ended_at_any_size() -> None:
    """With `drop_last` the tail of seven samples was dropped when eight ranks had read their share."""
    ranks = samplers(807, 8, drop_last=True)
    read(ranks)
    alone = DynaGCSSampler(data(807), drop_last=True)
    alone.load_state_dict(ranks[0].state_dict())
    assert alone.samples_left == 0
    assert len(list(alone)) == 807


def test_states_that_are_not_those_of_all_ranks_are_refused() -> None:
    ranks = samplers(100, 3)
    read(ranks, [5, 5, 7])
    states = [sampler.state_dict() for sampler in ranks]
    other = DynaGCSSampler(data(100))
    before = other.state_dict()
    for wrong in (states[:1], states[:2], [states[0], states[0], states[2]], [*states, states[0]]):
        with pytest.raises(StateError, match="give one state of each rank"):
            other.load_state_dict(wrong)
    with pytest.raises(StateError, match="of epochs"):
        other.load_state_dict([states[0], states[1], {**states[2], "epoch": 4}])
    with pytest.raises(StateError, match="did not begin or resume the epoch together"):
        other.load_state_dict([states[0], states[1], {**states[2], "dealt_at": 3, "places": [[9, 100, 1]]}])
    assert other.state_dict() == before


def test_ranks_of_a_group_continue_an_epoch_at_their_size_only() -> None:
    def made(replicas: int) -> DynaGCSSampler:
        return DynaGCSSampler(
            data(40), group=sampling_group("shared-log", 40), num_replicas=replicas, rank=0, batch_size=2
        )

    ranked = made(4)
    other = made(2)
    other.load_state_dict(ranked.state_dict())
    assert len(list(other)) == 20, "before the first sample the size does not matter"
    read([ranked], [3])
    with pytest.raises(StateError, match="in an epoch that 4 ranks read, and there are 2 now"):
        made(2).load_state_dict(ranked.state_dict())
    again = made(4)
    again.load_state_dict(ranked.state_dict())
    assert len(list(again)) == 7


@given(
    parts=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 5)), max_size=5),
    start=st.integers(0, 60),
    stop=st.integers(0, 200),
    step=st.integers(1, 7),
)
def test_places_are_cut_as_the_list_of_them(
    parts: list[tuple[int, int, int]], start: int, stop: int, step: int
) -> None:
    places = tuple(range(*part) for part in parts)
    listed = dealing.numbers(places).tolist()
    assert dealing.numbers(dealing.cut(places, start, stop, step)).tolist() == listed[start:stop:step]
    assert dealing.count(places) == len(listed)


def test_what_is_dealt_is_what_distributed_sampler_deals() -> None:
    order = np.arange(23)
    for replicas in range(1, 30):
        for drop_last in (False, True):
            for rank in range(replicas):
                own = DynaGCSSampler(data(23), num_replicas=replicas, rank=rank, drop_last=drop_last, shuffle=False)
                part = dealt(dealing.all_places(23), rank, replicas, drop_last=drop_last)
                assert order[part].tolist() == list(own)


KINDS: dict[str, Callable[..., Any]] = {
    "dynagcs": lambda **options: DynaGCSSampler(data(20), **options),
    "mixture": lambda **options: MixtureSampler([20], [1], **options),
    "budget": lambda **options: BudgetBatchSampler([1] * 20, 1, **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, replicas: int, **options: Any) -> list[Any]:
    return [KINDS[kind](num_replicas=replicas, rank=rank, **options) for rank in range(replicas)]


def in_loader(sampler: Any) -> DPFlowDataLoader[Any]:
    """A loader whose batches are of one item, or the batches of the sampler."""
    if isinstance(sampler, BudgetBatchSampler):
        return DPFlowDataLoader(range(20), batch_sampler=sampler)
    return DPFlowDataLoader(range(20), batch_size=1, sampler=sampler)


def left(sampler: Any) -> int:
    return int(sampler.batches_left if isinstance(sampler, BudgetBatchSampler) else sampler.samples_left)


@every_kind
def test_nothing_is_left_where_ranks_outnumber_it_and_the_tail_is_dropped(kind: str) -> None:
    loader = in_loader(made(kind, 2, drop_last=True)[0])
    list(zip(range(9), loader))
    for sampler in made(kind, 4, drop_last=True):
        other = in_loader(sampler)
        other.load_state_dict(loader.state_dict())
        assert list(other) == []
        sampler.set_epoch(1)
        assert len(list(other)) == 5


@every_kind
def test_a_loader_saved_after_the_last_batch_of_a_resized_epoch_reads_nothing(kind: str) -> None:
    loader = in_loader(made(kind, 2)[0])
    list(zip(range(4), loader))
    smaller = in_loader(made(kind, 3)[0])
    smaller.load_state_dict(loader.state_dict())
    batches = iter(smaller)
    for _ in range(4):
        next(batches)
    for replicas in (3, 2, 1):
        sampler = made(kind, replicas)[0]
        other = in_loader(sampler)
        other.load_state_dict(smaller.state_dict())
        assert list(other) == []
        sampler.set_epoch(1)
        assert len(list(other)) == len(sampler)


@every_kind
def test_places_that_fill_up_alone_are_nothing_left(kind: str) -> None:
    ranks = made(kind, 3)
    read(ranks, [6, 6, 6])
    state, ranks = ranks[0].state_dict(), made(kind, 4)
    for sampler in ranks:
        sampler.load_state_dict(state)
    read(ranks[:2], [1, 1])
    states = [sampler.state_dict() for sampler in ranks]
    for sampler in made(kind, 4):
        sampler.load_state_dict(states)
        assert left(sampler) == 0


@every_kind
def test_set_epoch_leaves_the_position_of_a_running_iteration(kind: str) -> None:
    sampler = made(kind, 2)[0]
    iterator = iter(sampler)
    sampler.set_epoch(0)
    for _ in range(3):
        next(iterator)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        state = sampler.state_dict()
        assert (state["epoch"], state["position"], left(sampler)) == (0, 3 + epoch, 7 - epoch)
        next(iterator)
        assert sampler.state_dict()["position"] == 4 + epoch
    assert len(list(iterator)) == 5
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)
    second = KINDS[kind](num_replicas=2, rank=0)
    second.set_epoch(1)
    assert list(sampler) == list(second)


@every_kind
def test_an_epoch_set_between_the_iterator_and_its_first_item_is_the_next_one(kind: str) -> None:
    """As with DistributedSampler, whose iterators have the epoch that was set before them."""
    sampler, plain = made(kind, 2)[0], made(kind, 2)[0]
    iterator = iter(sampler)
    sampler.set_epoch(3)
    assert sampler.state_dict()["epoch"] == 3
    assert next(iterator) == next(iter(plain))
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (0, 1)
    plain.set_epoch(3)
    assert list(sampler) == list(plain)


@every_kind
def test_without_ranks_set_epoch_decides_the_next_iteration_only(kind: str) -> None:
    sampler = KINDS[kind](num_replicas=None, rank=None)
    iterator = iter(sampler)
    for _ in range(3):
        next(iterator)
    sampler.set_epoch(0)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (0, 3)
    rest, first = list(iterator), list(sampler)
    assert first[3:] == rest, "epoch 0 again, as was set"
    assert list(sampler) != first


@every_kind
def test_a_list_that_lacks_a_rank_is_refused(kind: str) -> None:
    ranks = made(kind, 3)
    for steps in ([2, 3, 4], [2, 2, 2]):
        read(ranks, steps)
        states = [sampler.state_dict() for sampler in ranks]
        other = KINDS[kind](num_replicas=1, rank=0)
        for wrong in (states[:1], states[2:], states[:2], states[1:]):
            with pytest.raises(StateError, match="give one state of each rank"):
                other.load_state_dict(wrong)
    other.load_state_dict(states[2])
    assert other.state_dict()["position"] == 2


@every_kind
def test_damaged_positions_are_refused(kind: str) -> None:
    sampler = made(kind, 2)[0]
    read([sampler], [3])
    state = sampler.state_dict()
    wrong: list[dict[str, Any]] = [
        {**state, "places": [[4, 20, 1]]},
        {**state, "dealt_at": 10**30, "position": 10**30},
        {**state, "num_replicas": 10**30},
        *({**state, name: 10**30} for name in ("drawn", "began_with") if name in state),
        *({key: value for key, value in state.items() if key != lost} for lost in state if lost != "num_replicas"),
    ]
    for one in wrong:
        with pytest.raises(StateError):
            sampler.load_state_dict(one)
    assert sampler.state_dict() == state
