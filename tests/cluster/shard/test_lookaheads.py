"""Lookaheads at a shard: cut by the router, and started where the jobs' requests here are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.control.lookaheads import (
    FIRST_HORIZON,
    HORIZON,
    KnownEpoch,
    LookaheadParts,
    ShardLookaheads,
    joint_order,
)
from torch_dpflow.cluster.messages.router import JobLookahead
from torch_dpflow.lookahead import Lookahead

FLOW, SIZE = "flow:v1", 24
NOTHING = np.empty(0, np.int64)


def answer_of(known: KnownEpoch, first: int, end: int, version: int = 1) -> tuple[JobLookahead, LookaheadParts]:
    answer, arrays = known.cut(first, end, SIZE)
    answer.version = version
    parts = LookaheadParts.of([memoryview(array.tobytes()) for array in arrays], SIZE)
    assert parts is not None
    return answer, parts


def told(shard: ShardLookaheads, known: KnownEpoch, first: int = 0, end: int = SIZE) -> Lookahead | None:
    (request,) = shard.requests()
    return shard.answered(request, *answer_of(known, first, end))


def of_order(order: Sequence[int], *, done: int = 0, drawn: int = 0, epoch: int = 0) -> KnownEpoch:
    """An epoch whose order is known; `done` were read before it was begun with this router, `drawn` by now."""
    whole = np.array(order, np.int64)
    ahead = Lookahead.of_order(whole, epoch=epoch, position=drawn, following=whole[::-1].copy())
    return KnownEpoch(ahead, whole[done:drawn], np.sort(whole[:done]))


@given(st.permutations(range(SIZE)), st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, SIZE), st.data())
def test_a_known_order_starts_at_what_was_requested_here(
    order: list[int], first: int, end: int, drawn: int, data: st.DataObject
) -> None:
    first, end = sorted((first, end))
    if first == end:
        return
    requested = data.draw(st.integers(0, drawn))
    shard = ShardLookaheads(FLOW, SIZE)
    shard.assign(first, end)
    mine = [key for key in order[:requested] if first <= key < end]
    assert shard.wanted("job", "job", 0, mine)
    lookahead = told(shard, of_order(order, drawn=drawn), first, end)
    assert lookahead is not None
    assert lookahead.certain.tolist() == [key for key in order[requested:] if first <= key < end]
    assert (lookahead.position, lookahead.length) == (len(mine), end - first)
    assert lookahead.complete
    assert lookahead.members is not None
    assert sorted(lookahead.members.tolist()) == list(range(first, end))
    assert lookahead.following is not None
    assert lookahead.following.tolist() == [key for key in order[::-1] if first <= key < end]


def test_a_job_that_resumes_needs_only_the_rest_of_its_epoch_and_all_of_the_next() -> None:
    shard = ShardLookaheads(FLOW, SIZE)
    shard.wanted("job", "job", 3, [])
    order = list(range(0, SIZE, 2))
    lookahead = told(shard, of_order(order, done=5, drawn=7, epoch=3))
    assert lookahead is not None
    assert lookahead.certain.tolist() == order[5:]
    assert (lookahead.position, lookahead.length) == (5, len(order))
    assert lookahead.members is not None
    assert lookahead.members.tolist() == order


def test_likely_samples_keep_their_weights_and_those_requested_here_are_left_out() -> None:
    shard = ShardLookaheads(FLOW, SIZE)
    shard.wanted("job", "job", 0, [1, 8])
    ahead = Lookahead(
        epoch=0,
        length=12,
        position=4,
        certain=np.array([3, 8]),
        likely=np.array([1, 5, 20]),
        weights=np.array([3.0, 2.0, 1.0]),
        members=np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20]),
    )
    known = KnownEpoch(ahead, np.array([4, 7]), np.array([0, 2]))
    lookahead = told(shard, known)
    assert lookahead is not None
    assert not lookahead.complete
    assert lookahead.certain.tolist() == [4, 7, 3]
    assert lookahead.likely.tolist() == [5, 20]
    assert lookahead.weights.tolist() == [2.0, 1.0]
    assert lookahead.members is not None
    assert lookahead.members.tolist() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 20]
    assert (lookahead.position, lookahead.length) == (2, 10)


def test_ranks_are_one_job_in_the_latest_epoch_of_any() -> None:
    shard = ShardLookaheads(FLOW, SIZE)
    assert shard.wanted("job/0", "job", 0, [0, 2])
    assert shard.wanted("job/1", "job", 0, [1])
    assert len(shard.requests()) == 1
    assert shard.wanted("job/0", "job", 1, [5])
    assert not shard.wanted("job/1", "job", 0, [3])
    lookahead = told(shard, of_order(range(SIZE), epoch=1))
    assert lookahead is not None
    assert 3 in lookahead.certain
    assert 5 not in lookahead.certain
    shard.leave("job/0", "job")
    shard.leave("job/1", "job")
    assert shard.wanted("job/0", "job", 0, [])
    assert len(shard.requests()) == 1


def test_an_answer_of_another_epoch_or_of_other_keys_is_no_lookahead() -> None:
    shard = ShardLookaheads(FLOW, SIZE)
    shard.wanted("job", "job", 1, [])
    assert told(shard, of_order(range(SIZE), epoch=0)) is None
    shard.assign(0, 12)
    (request,) = shard.requests()
    shard.assign(12, SIZE)
    assert shard.answered(request, *answer_of(of_order(range(SIZE), epoch=1), 0, 12)) is None
    assert [(one.first, one.end) for one in shard.requests()] == [(12, SIZE)]


def test_the_next_request_follows_as_the_job_reads_and_has_the_version_of_the_last_answer() -> None:
    shard = ShardLookaheads(FLOW, SIZE)
    shard.wanted("job", "job", 0, [0])
    (request,) = shard.requests()
    assert request.version == 0
    answer, parts = answer_of(of_order(range(SIZE)), 0, SIZE, version=7)
    assert shard.answered(request, answer, parts) is not None
    shard.wanted("job", "job", 0, [1, 2])
    assert not shard.is_due
    shard.wanted("job", "job", 0, [3])
    (request,) = shard.requests()
    assert request.version == 7
    assert shard.answered(request, answer, None) is None
    assert shard.answered(request, answer, parts) is None


@given(st.integers(1, 5), st.integers(0, 20))
def test_the_orders_of_ranks_are_one_order_in_turns(replicas: int, total: int) -> None:
    order = np.random.default_rng(total).permutation(total)
    parts = {rank: order[rank::replicas] for rank in reversed(range(replicas))}
    assert np.array_equal(joint_order(parts, replicas), order)


def test_each_lookahead_of_an_epoch_is_twice_as_long_as_the_one_before_up_to_the_horizon() -> None:
    shard = ShardLookaheads(FLOW, SIZE)
    for epoch in range(2):
        expected, version = FIRST_HORIZON, 10 * epoch + 1
        shard.wanted("job", "job", epoch, [0])
        while expected < HORIZON:
            (request,) = shard.requests()
            assert request.horizon == expected
            assert shard.answered(request, *answer_of(of_order(range(SIZE), epoch=epoch), 0, SIZE, version)) is not None
            shard.wanted("job", "job", epoch, [*range(SIZE)])
            expected, version = 2 * expected, version + 1
        assert shard.requests()[0].horizon == HORIZON


def test_a_shard_without_keys_requests_no_lookahead_until_it_has_some() -> None:
    shard = ShardLookaheads("f:v1", 10)
    shard.wanted("reader", "job", 0, [1])
    shard.assign(0, 0)
    assert shard.requests() == []
    shard.assign(2, 5)
    assert [(request.first, request.end) for request in shard.requests()] == [(2, 5)]
