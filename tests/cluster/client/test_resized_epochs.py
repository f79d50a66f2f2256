"""An epoch of a flow that runs with several numbers of ranks read one after another: each sample once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.cluster.client.epoch_cursor import EpochCursor, check_resumable
from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.control.joint_order import Held, JointOrder
from torch_dpflow.cluster.messages.router import JobRank
from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.errors import StateError, UsageError
from torch_dpflow.loader.loaded_state import join_flow_states
from torch_dpflow.samplers import STRATEGIES, RankShares, SamplingGroup, sampling_group

SEED = 5


class Run:
    """All ranks of a run, and a router that it alone has."""

    def __init__(
        self,
        length: int,
        replicas: int,
        states: Any = None,
        *,
        epoch: int = 0,
        drop_last: bool = False,
        group: SamplingGroup | None = None,
    ) -> None:
        """states: one of these for all ranks, or a list of one for each."""
        self.group = sampling_group("shared-log", length) if group is None else group
        self.group.join("job", seed=SEED, batch_size=2 * replicas)
        self.order = JointOrder(self.group, "job", RankShares(length, replicas, drop_last))
        self.epoch = epoch
        self.read: list[list[int]] = [[] for _ in range(replicas)]
        self.cursors = []
        for rank in range(replicas):
            part = None if replicas == 1 else JobRank("job", rank, replicas, drop_last)
            job = JobDescription(flow="flow", version=1, name="job", seed=SEED, size=length, batch_size=2, rank=part)
            cursor = EpochCursor(job, epoch)
            if states is not None:
                cursor.resume(epoch, states[rank] if isinstance(states, list) else states)
            self.cursors.append(cursor)
            self.order.start(rank, [held(cursor)])

    def draw(self, rank: int, count: int) -> None:
        cursor = self.cursors[rank]
        keys = self.order.draw(rank, self.epoch, cursor.position, count).tolist()
        cursor.add(keys, cursor.position + len(keys))
        self.read[rank] += keys

    def finish(self) -> list[int]:
        """What all ranks read until the end of the epoch."""
        for rank, cursor in enumerate(self.cursors):
            while cursor.left:
                self.draw(rank, 7)
        return [*chain.from_iterable(self.read)]

    def state(self, rank: int) -> dict[str, Any]:
        cursor = self.cursors[rank]
        if not cursor.knows_all_ranks:
            marks = self.order.read_by_all(self.epoch, cursor.position)
            cursor.together = None if marks is None else (cursor.position, marks)
        state: dict[str, Any] = json.loads(json.dumps(cursor.state()))
        return state

    def joined(self) -> dict[str, Any]:
        """The states of all ranks, joined."""
        states = [loader_state(self.state(rank)) for rank in range(len(self.cursors))]
        shared = join_flow_states(states, 0).shared
        assert shared is not None
        return shared


def held(cursor: EpochCursor) -> Held:
    def samples(marks: Any) -> Any:
        return np.flatnonzero(np.unpackbits(marks)) if marks is not None else np.empty(0, np.int64)

    return Held(cursor.epoch, cursor.position, samples(cursor.marks), samples(cursor.earlier))


def loader_state(shared: dict[str, Any] | None, **given: Any) -> LoaderState:
    return LoaderState(**{"fresh": False, "base_seed": 0, "shared": shared, **given})


def disturb(group: SamplingGroup, data: st.DataObject) -> None:
    """Another job draws, so that the order is not that of a job alone."""
    if group.remaining("other"):
        group.next("other", data.draw(st.integers(1, 9)))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 60), st.lists(st.integers(1, 9), min_size=2, max_size=5), st.booleans(), st.booleans())
def test_every_sample_is_read_once_by_ranks_in_step(
    data: st.DataObject, length: int, sizes: list[int], drop_last: bool, one_state: bool
) -> None:
    before: list[int] = []
    states: Any = None
    for number, replicas in enumerate(sizes):
        group = sampling_group("shared-log", length)
        group.join("other", seed=8)
        group.start_epoch("other", 0)
        run = Run(length, replicas, states, drop_last=drop_last, group=group)
        rest = length - len(set(before))
        share = RankShares(rest, replicas, drop_last).per_rank
        assert {cursor.left for cursor in run.cursors} == {share}
        if number < len(sizes) - 1:
            assume(share)  # else the epoch is over
            most = rest // replicas  # without the padding of the end
            steps = data.draw(st.integers(0, max(0, most - (not rest % replicas or drop_last))))
            for _ in range(steps):
                for rank in range(replicas):
                    run.draw(rank, 1)
                disturb(group, data)
            before += chain.from_iterable(run.read)
            states = run.state(data.draw(st.integers(0, replicas - 1))) if one_state else run.joined()
    assert len(set(before)) == len(before)
    together = run.finish()
    left, last = set(range(length)) - set(before), sizes[-1]
    assert len({*map(len, run.read)}) == 1
    if drop_last:
        assert len(left) - len(together) == len(left) % last
        assert len(set(together)) == len(together)
        assert set(together) <= left
    else:
        # As many ranks as before may be filled up with samples that they had read.
        assert set(together) >= left if sizes[-2] == last else set(together) == left
        assert len(together) - len(left) == -len(left) % last


@settings(deadline=None, max_examples=60)
@given(
    st.data(),
    st.integers(1, 60),
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.booleans(),
    st.sampled_from(sorted(STRATEGIES)),
)
def test_every_sample_is_read_once_by_ranks_that_are_out_of_step(
    data: st.DataObject, length: int, sizes: list[int], drop_last: bool, strategy: str
) -> None:
    read: Counter[int] = Counter()
    states: Any = None
    allowed = 0
    for replicas in sizes:
        group = sampling_group(strategy, length)
        group.join("other", seed=8)
        group.start_epoch("other", 0)
        run = Run(length, replicas, states, drop_last=drop_last, group=group)
        allowed += replicas - 1
        for _ in range(data.draw(st.integers(0, 8))):
            run.draw(data.draw(st.integers(0, replicas - 1)), data.draw(st.integers(1, 5)))
            disturb(group, data)
        states = run.joined()
        if replicas is sizes[-1]:
            break
        read.update(chain.from_iterable(run.read))
    read.update(run.finish())
    # Each run evens out its end at most once.
    assert sum(read.values()) - len(read) <= (0 if drop_last else allowed)
    assert length - len(read) <= (allowed if drop_last else 0)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(1, 16), st.floats(0, 0.9)), min_size=1, max_size=4),
    st.integers(1, 16),
)
def test_alone_the_rest_is_dealt_as_distributed_sampler_deals(
    length: int, earlier: list[tuple[int, float]], last: int
) -> None:
    sampler: Any = DistributedSampler(Numbers(length), 1, 0, seed=SEED)
    order: list[int] = list(sampler)
    states: Any = None
    for replicas, share in earlier:
        run = Run(length, replicas, states)
        steps = int(len(order) // replicas * share)
        for rank in range(replicas):
            run.draw(rank, steps)
            assert run.read[rank] == order[rank : steps * replicas : replicas]
        states, order = run.state(0), order[steps * replicas :]
    run = Run(length, last, states)
    run.finish()
    sizes, even = [size for size, _ in earlier], -(-len(order) // last) * last
    expected = [[*islice(cycle(order), even)][rank::last] for rank in range(last)]
    whole = len(order) // last  # as many ranks as before are filled up with other samples
    assert [one[:whole] for one in run.read] == [one[:whole] for one in expected]
    assert last in sizes or run.read == expected


def test_an_epoch_that_was_read_to_its_end_is_over_at_any_size() -> None:
    run = Run(22, 4, drop_last=True)
    run.finish()
    for states in (run.state(2), run.joined()):
        for replicas in (1, 2, 3, 4):
            assert not Run(22, replicas, states, drop_last=True).finish()


def test_what_drop_last_has_left_out_is_not_read_in_another_batch_size() -> None:
    job = JobDescription(flow="flow", version=1, name="job", seed=SEED, size=30, batch_size=8, drop_last=True)
    cursor = EpochCursor(job, 0)
    cursor.add([*range(24)], 24)
    again = EpochCursor(replace(job, batch_size=2), 0)
    again.resume(0, cursor.state())
    assert (again.left, again.state()["over"]) == (0, True)


def test_a_state_before_the_first_batch_begins_the_epoch_at_any_size() -> None:
    first = Run(22, 4)
    for states in (first.state(1), first.joined()):
        assert sorted(Run(22, 2, states).finish()) == list(range(22))


def test_a_state_of_another_rank_resumes_as_many_ranks_that_were_in_step() -> None:
    run = Run(30, 3)
    for rank in range(3):
        run.draw(rank, 4)
    state, read = run.state(1), [*chain.from_iterable(run.read)]
    again = Run(30, 3, state)
    again.draw(0, 3)
    assert sorted(read + again.finish()) == list(range(30))
    # Each rank may as well have its own state: the ranks agree on what was read.
    assert sorted(read + Run(30, 3, [run.state(0), state, state]).finish()) == list(range(30))


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_loaded_state_that_is_saved_again_is_that_of_each_rank(is_joined: bool) -> None:
    """Before the first batch, by loaders of another number of ranks: a job that is preempted right after its start."""
    run = Run(30, 2)
    for rank in range(2):
        run.draw(rank, 5)
    read = [*chain.from_iterable(run.read)]
    state = (
        loader_state(run.state(1))
        if not is_joined
        else join_flow_states([*map(loader_state, run.joined()["ranks"])], 0)
    )
    again = []
    for rank in range(4):
        sampler: Any = DistributedSampler(range(30), num_replicas=4, rank=rank)
        loader: Any = DPFlowDataLoader(range(30), 2, sampler=sampler, flow="flow", job=JobOptions(name="job"))
        loader._runtime.pending = state
        again.append(LoaderState.from_dict(loader.state_dict()))
    for states in (again, again[:1]):
        for replicas in (1, 4):
            shared = join_flow_states(states, 0).shared if len(states) > 1 else states[0].shared
            assert {*read, *Run(30, replicas, shared).finish()} == set(range(30))
            assert len(read) + len(Run(30, replicas, shared).finish()) - 30 <= replicas - 1


def test_a_router_that_has_forgotten_knows_what_all_ranks_read_once_they_have_passed_its_restart() -> None:
    run = Run(42, 2)
    run.draw(0, 3)
    run.draw(1, 6)
    states = [run.state(rank) for rank in range(2)]
    again = Run(42, 2, states)
    assert again.order.read_by_all(0, 3) is None
    check_resumable(again.joined(), 3)
    again.draw(0, 2)
    with pytest.raises(StateError, match=r"samples of rank 0 of 2 only.*the states of all 2 ranks as a list"):
        Run(42, 3, again.state(0))
    with pytest.raises(StateError, match="of rank 0 of 2 only"):
        check_resumable(again.state(0), 3)
    check_resumable(again.state(0), 2)
    again.draw(0, 1)
    read = [*chain.from_iterable(run.read + again.read)]
    assert sorted(read + Run(42, 3, again.state(0)).finish()) == list(range(42))


def test_ranks_that_resume_different_runs_are_refused() -> None:
    run = Run(30, 3)
    for rank in range(3):
        run.draw(rank, 4)
    state = run.state(0)
    with pytest.raises(UsageError, match=r"ranks 0 and 1 .* after 12 and 0 samples .* resume all ranks from the same"):
        Run(30, 2, [state, Run(30, 2).state(1)])


def part(**changes: Any) -> dict[str, Any]:
    run = Run(30, 2)
    run.draw(0, 3)
    return {**run.state(0), **changes}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (part(position=9), "rank 0 of 2 at position 9 with 3 samples"),
        (part(position=-1), "damaged"),
        (part(rank=[2, 2]), "rank 2 of 2"),
        (part(rank=7), "damaged"),
        (part(done="AAAA"), "3 bytes of marks; 4 bytes are right"),
        (part(done="/////w=="), "a sample beyond the 30"),
        (part(earlier="?"), "damaged"),
        (part(epoch=1), "of epoch 1 of 30 samples"),
        (part(size=31), "of epoch 0 of 31 samples"),
        ({"ranks": []}, "its ranks are"),
        ({"ranks": [part(), part()]}, r"\[\[0, 2\], \[0, 2\]\]; give one state of every rank"),
        ({"ranks": [part(), part(rank=[1, 3])]}, "give one state of every rank"),
        ({"ranks": [part(), part(rank=[1, 2], earlier="gAAAAA==")]}, "different earlier runs"),
    ],
)
def test_states_that_are_damaged_or_do_not_belong_together_are_refused(state: dict[str, Any], message: str) -> None:
    job = JobDescription(flow="flow", version=1, name="job", seed=SEED, size=30, batch_size=2)
    cursor = EpochCursor(job, 0)
    with pytest.raises(StateError, match=message):
        cursor.resume(0, state)
    if message not in ("of epoch 1 of 30 samples", "of epoch 0 of 31 samples"):  # of another flow or epoch
        with pytest.raises(StateError, match=message):
            check_resumable({"epoch": 0, **state}, 2)
    assert not cursor.position
    assert not cursor.marks.any()
    assert cursor.earlier is None


def test_samples_that_are_not_the_jobs_are_refused() -> None:
    indices = np.array([1, 3, 5, 7])
    job = JobDescription(flow="flow", version=1, name="job", seed=SEED, size=30, batch_size=2, indices=indices)
    run = Run(30, 2)
    run.draw(0, 3)
    run.draw(1, 3)
    with pytest.raises(StateError, match="which the job does not read"):
        EpochCursor(job, 0).resume(0, run.state(0))


def test_ranks_that_had_not_begun_count_as_having_read_nothing() -> None:
    run = Run(20, 3)
    run.draw(0, 4)
    states = [loader_state(run.state(0), epoch=2), LoaderState(epoch=2), LoaderState(epoch=2)]
    for replicas in (2, 3):
        rest = Run(20, replicas, join_flow_states(states, 0).shared).finish()
        assert sorted(set(run.read[0] + rest)) == list(range(20))


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([loader_state(part()), loader_state(part(epoch=1, rank=[1, 2]))], "of several epochs, 0, 1"),
        ([loader_state(part()), loader_state(part(seed=1, rank=[1, 2]))], "of several seeds"),
        ([loader_state(part()), LoaderState(shared={"seed": SEED, "epoch": 1})], "of several epochs"),
        ([loader_state(part(), epoch=3), LoaderState(epoch=2)], r"of iteration \[2\], others of \[3\]"),
        ([loader_state(part())], r"1 states are given, of \[rank, ranks\] \[\[0, 2\]\]"),
        ([loader_state(part()), loader_state(part())], "give one state of every rank"),
        ([loader_state(part()), loader_state(None)], "another one was not"),
        ([loader_state({"ranks": []}), loader_state(part())], "not joined ones"),
        ([LoaderState(), LoaderState()], "no position in a flow"),
    ],
)
def test_states_of_ranks_that_cannot_be_joined_are_refused(states: list[LoaderState], message: str) -> None:
    with pytest.raises(StateError, match=message):
        join_flow_states(states, 0)


def test_between_epochs_the_next_one_begins_at_any_size() -> None:
    after = [LoaderState(epoch=3, shared={"seed": SEED, "epoch": 7}) for _ in range(2)]
    assert join_flow_states(after, 5).shared == {"seed": SEED, "epoch": 7}
