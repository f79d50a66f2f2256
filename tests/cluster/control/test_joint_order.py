"""One draw for all ranks of a job: each sample to one rank, whatever router and ranks go through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DistributedSampler

from tests.invariants import validate
from torch_dpflow.cluster.control import joint_order
from torch_dpflow.cluster.control.joint_order import Held, JointOrder
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import AwaitedRanksError, OutOfStepError
from torch_dpflow.samplers import RankShares, sampling_group


def make(length: int, replicas: int, *, drop_last: bool = False, seed: int = 0) -> JointOrder:
    group = sampling_group("shared-log", length)
    group.join("job", seed=seed, batch_size=2 * replicas)
    return JointOrder(group, "job", RankShares(length, replicas, drop_last))


def held(epoch: int, samples: list[int]) -> Held:
    return Held(epoch, len(samples), np.unique(np.array(samples, np.int64)))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.integers(0, 3), st.randoms())
def test_alone_the_ranks_read_what_distributed_sampler_deals(
    length: int, replicas: int, drop_last: bool, epoch: int, random: object
) -> None:
    order = make(length, replicas, drop_last=drop_last, seed=5)
    given = [DistributedSampler(range(length), replicas, rank, seed=5, drop_last=drop_last) for rank in range(replicas)]
    for rank, sampler in enumerate(given):
        sampler.set_epoch(epoch)
        order.start(rank, [Held(epoch)])
    drawn: list[list[int]] = [[] for _ in given]
    ranks = [rank for rank, sampler in enumerate(given) for _ in range(len(sampler))]
    random.shuffle(ranks)  # type: ignore[attr-defined]
    for rank in ranks:
        drawn[rank] += order.draw(rank, epoch, len(drawn[rank]), 1).tolist()
    assert drawn == [list(sampler) for sampler in given]
    assert all(not len(order.draw(rank, epoch, len(drawn[rank]), 9)) for rank in range(replicas))


def test_nobody_draws_before_every_rank_is_there() -> None:
    order = make(10, 3)
    with pytest.raises(OutOfStepError):
        order.draw(1, 0, 0, 2)
    order.start(1, [Held(0)])
    with pytest.raises(AwaitedRanksError, match=r"waits for its ranks \[0, 2\]"):
        order.draw(1, 0, 0, 2)
    for rank in (0, 2):
        order.start(rank, [Held(0)])
    assert len(order.draw(1, 0, 0, 2)) == 2


def test_the_same_places_have_the_same_samples_and_a_rank_that_comes_back_goes_on() -> None:
    order = make(12, 2)
    for rank in range(2):
        order.start(rank, [Held(0)])
    first = order.draw(0, 0, 0, 4).tolist()
    assert order.draw(0, 0, 0, 4).tolist() == first
    order.start(0, [held(0, first[:3])])
    assert order.draw(0, 0, 3, 1).tolist() == first[3:]


def test_what_all_ranks_have_read_is_extended_by_what_they_read_since(monkeypatch: pytest.MonkeyPatch) -> None:
    order, marked, mark = make(1000, 2), [], joint_order.mark
    for rank in range(2):
        order.start(rank, [Held(0)])
    drawn = [order.draw(rank, 0, 0, 500).tolist() for rank in range(2)]
    monkeypatch.setattr(joint_order, "mark", lambda marks, samples: (marked.append(len(samples)), mark(marks, samples)))
    answers = []
    for position in (100, 100, 300, 301, 50):
        found = order.read_by_all(0, position)
        assert found is not None
        answers.append((position, found))
    for position, found in answers:  # an answer that may be in transit is not written
        assert np.flatnonzero(np.unpackbits(found, count=1000)).tolist() == sorted(
            drawn[0][:position] + drawn[1][:position]
        )
    assert marked == [0, 200, 400, 2, 0, 100]


def test_places_that_a_job_without_ranks_has_passed_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_order, "KEPT_PLACES", 20)
    order, read = make(300, 1), list[int]()
    order.start(0, [Held(0)])
    while len(read) < 250:
        read += order.draw(0, 0, len(read), 7).tolist()
    assert order.draw(0, 0, len(read) - 20, 20).tolist() == read[-20:]
    with pytest.raises(OutOfStepError):
        order.draw(0, 0, 100, 7)
    slots = next(iter(order._epochs.values()))._slots
    assert np.count_nonzero(slots) <= 2 * 20 + 7
    order.start(0, [held(0, read[:200])])  # as after an answer that was lost: what follows is dealt again
    assert sorted(read[:200] + order.draw(0, 0, 200, 100).tolist()) == list(range(300))
    validate(order)


def test_one_that_is_epochs_ahead_leaves_the_others_theirs() -> None:
    order = make(9, 2, drop_last=True)
    for rank in range(2):
        order.start(rank, [Held(0)])
    mine = order.draw(0, 0, 0, 4).tolist()
    order.start(0, [Held(1)])
    order.draw(0, 1, 0, 1)
    theirs = order.draw(1, 0, 0, 4).tolist()
    assert len({*mine, *theirs}) == 8
    order.start(0, [Held(2)])
    assert order.draw(1, 0, 3, 1).tolist() == theirs[3:]
    for epoch in (1, 2, 3):
        order.start(1, [Held(epoch)])
    with pytest.raises(OutOfStepError):  # every rank has passed it
        order.draw(1, 0, 3, 1)


def test_a_rank_that_has_read_nothing_begins_without_others_that_have_not() -> None:
    order = make(12, 3)
    order.start(1, [Held(0)], fresh=True)
    with pytest.raises(AwaitedRanksError):
        order.draw(1, 0, 0, 2)
    read = {1: order.draw(1, 0, 0, 4, alone=True).tolist()}
    for epoch in (1, 2):
        order.start(1, [Held(epoch)])
        order.draw(1, epoch, 0, 4)
    for rank in (0, 2):
        order.start(rank, [Held(0)], fresh=True)
        read[rank] = order.draw(rank, 0, 0, 4).tolist()
    assert sorted(read[0] + read[1] + read[2]) == list(range(12))


def test_a_rank_that_resumes_is_awaited_by_those_that_have_read_nothing() -> None:
    order = make(12, 2)
    order.start(0, [held(0, [3, 4])])
    order.start(0, [Held(0)], fresh=False)  # of a state of the epoch's beginning
    with pytest.raises(AwaitedRanksError):
        order.draw(0, 0, 0, 2, alone=True)


def test_readers_of_one_rank_read_the_same_side_by_side() -> None:
    order = make(12, 2)
    for rank in range(2):
        order.start(rank, [Held(0)], reader="first")
    first = order.draw(0, 0, 0, 4).tolist()
    order.start(0, [Held(0)], reader="second")
    assert order.draw(0, 0, 0, 4).tolist() == first
    for epoch in (1, 2, 3):
        for rank, reader in ((0, "second"), (1, "first")):
            order.start(rank, [Held(epoch)], reader=reader)
    assert order.draw(0, 0, 4, 2).tolist() == order.draw(0, 0, 4, 2).tolist()  # kept for the first reader
    order.leave(0, "first")
    order.start(1, [Held(4)], reader="first")
    with pytest.raises(OutOfStepError):
        order.draw(0, 0, 4, 2)


def test_ranks_two_epochs_apart_are_told_so() -> None:
    order = make(8, 2)
    order.start(0, [Held(2), held(1, [1, 2, 3, 4])])
    with pytest.raises(UsageError, match="is in epoch 2 and does not know what it read of epoch 0"):
        order.start(1, [Held(0)])
    order.start(1, [held(1, [5, 6])])
    assert sorted(order.draw(1, 1, 2, 4).tolist()) == [0, 7]
    assert len(order.draw(0, 2, 0, 4)) == 4


def test_samples_that_are_not_the_jobs_are_refused() -> None:
    group = sampling_group("shared-log", 10)
    group.join("job", [1, 3, 5, 7])
    order = JointOrder(group, "job", RankShares(4, 1, False))
    with pytest.raises(UsageError, match="not in the set"):
        order.start(0, [held(0, [2])])
    with pytest.raises(UsageError, match="5 samples of an epoch of 4"):
        order.start(0, [held(0, [1, 3, 5, 7, 9])])
    order.start(0, [held(0, [3])])
    assert sorted(order.draw(0, 0, 1, 9).tolist()) == [1, 5, 7]


class Ranks(RuleBasedStateMachine):
    """Ranks that draw, go on to the next epoch, come back from checkpoints, and become more or fewer in mid-epoch.

    The router may forget all.
    """

    @initialize(length=st.integers(1, 30), replicas=st.integers(1, 4), drop_last=st.booleans())
    def begin(self, length: int, replicas: int, drop_last: bool) -> None:
        self.length, self.shares = length, RankShares(length, replicas, drop_last)
        #: By epoch and rank, what has been drawn, in order.
        self.drawn: dict[int, list[list[int]]] = {0: [[] for _ in range(replicas)]}
        #: By epoch, what runs with other numbers of ranks had drawn.
        self.earlier: dict[int, set[int]] = {}
        self.epochs = [0] * replicas
        self.order = make(length, replicas, drop_last=drop_last)
        #: Ranks that have begun; the others have read nothing.
        self.begun: set[int] = set()

    def restart(self) -> None:
        self.order = make(self.length, self.shares.replicas, drop_last=self.shares.drop_last)
        for rank in range(self.shares.replicas):
            self.tell(rank)

    def tell(self, rank: int) -> None:
        now = self.epochs[rank]
        places = [
            replace(
                held(epoch, self.drawn[epoch][rank]), earlier=np.array(sorted(self.earlier.get(epoch, [])), np.int64)
            )
            for epoch in (now, now - 1)
            if epoch in self.drawn
        ]
        self.order.start(rank, places, reader="reader", fresh=rank not in self.begun)

    @rule(data=st.data(), count=st.integers(1, 9))
    def draw(self, data: st.DataObject, count: int) -> None:
        rank = data.draw(st.integers(0, self.shares.replicas - 1))
        epoch = self.epochs[rank]
        mine = self.drawn[epoch][rank]
        if rank not in self.begun:
            self.tell(rank)
        mine += self.order.draw(rank, epoch, len(mine), count, alone=True).tolist()
        self.begun.add(rank)
        if len(mine) == self.shares_in(epoch).per_rank and epoch < min(self.epochs) + 4:
            self.epochs[rank] += 1
            self.drawn.setdefault(epoch + 1, [[] for _ in self.epochs])
            self.tell(rank)

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.tell(data.draw(st.integers(0, self.shares.replicas - 1)))

    @precondition(lambda self: max(self.epochs) <= min(self.epochs) + 1)
    @rule()
    def forget(self) -> None:
        self.restart()

    @precondition(lambda self: len(set(self.epochs)) == 1)
    @rule(data=st.data())
    def go_back_to_a_checkpoint(self, data: st.DataObject) -> None:
        epoch = self.epochs[0]
        for mine in self.drawn[epoch]:
            del mine[data.draw(st.integers(0, len(mine))) :]
        for rank in range(self.shares.replicas):
            self.tell(rank)
        # Whoever told first did so before others contradicted what was dealt.
        for rank in self.order.awaited:
            self.tell(rank)

    def shares_in(self, epoch: int) -> RankShares:
        return replace(self.shares, length=self.length - len(self.earlier.get(epoch, [])))

    @precondition(lambda self: len(set(self.epochs)) == 1)
    @rule(replicas=st.integers(1, 4))
    def become_more_or_fewer(self, replicas: int) -> None:
        epoch = self.epochs[0]
        read = self.earlier.get(epoch, set()).union(*self.drawn[epoch])
        self.earlier, self.drawn = {epoch: read}, {epoch: [[] for _ in range(replicas)]}
        self.shares, self.epochs, self.begun = (
            replace(self.shares, replicas=replicas),
            [epoch] * replicas,
            {*range(replicas)},
        )
        self.restart()

    @invariant()
    def each_sample_goes_to_one_rank(self) -> None:
        if not hasattr(self, "order"):
            return
        validate(self.order)
        for epoch, parts in self.drawn.items():
            shares = self.shares_in(epoch)
            given = [sample for part in parts for sample in part]
            extra = len(given) - len(set(given))
            assert extra <= max(0, shares.total - shares.length)
            assert not self.earlier.get(epoch, set()) & set(given)
            if all(len(part) == shares.per_rank for part in parts):
                assert len(set(given)) == min(shares.length, shares.total)


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
