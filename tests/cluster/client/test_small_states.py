"""The state of a job of a large flow is small where its order follows from seed and epoch."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from torch_dpflow._core.permutation import epoch_order
from torch_dpflow.cluster.client.epoch_cursor import MAX_MARKED, EpochCursor, check_resumable
from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.control.joint_order import Held, JointOrder
from torch_dpflow.errors import StateError
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.passes import RankShares

SIZE, EPOCH, BATCH = 2_000_003, 4, 1000
JOB = JobDescription(flow="f", version=1, name="job", seed=9, size=SIZE, batch_size=BATCH)


def read(batches: int, job: JobDescription = JOB, strategy: str = "shared-log", other_at: int = -1) -> EpochCursor:
    """Return the position after so many batches, as a router draws them. other_at: when another job reads a batch."""
    group = sampling_group(strategy, job.size)
    group.join("job", seed=job.seed)
    order = JointOrder(group, "job", RankShares(job.size, 1, False))
    order.start(0, [Held(EPOCH)])
    cursor = EpochCursor(job, EPOCH)
    for position in range(0, batches * BATCH, BATCH):
        if position == other_at * BATCH:
            group.join("other", seed=1)
            group.start_epoch("other", 0)
            group.next("other", BATCH)
        cursor.add(order.draw(0, EPOCH, position, BATCH).tolist(), position + BATCH)
        cursor.in_order = group.in_order("job")
    return cursor


@pytest.mark.parametrize("strategy", ["shared-log", "independent"])
@pytest.mark.parametrize("batches", [0, 1, 150])
def test_it_resumes_what_was_read(batches: int, strategy: str) -> None:
    before = read(batches, strategy=strategy)
    state = before.state()
    assert len(json.dumps(state)) <= 64 << 10
    check_resumable(state, 1)
    after = EpochCursor(JOB, 0)
    after.resume(EPOCH, json.loads(json.dumps(state)))
    assert (after.epoch, after.position) == (EPOCH, batches * BATCH)
    assert np.array_equal(after.marks, before.marks)
    assert after.state() == state  # before a router is asked


def test_samples_that_are_not_the_first_of_the_order_are_refused() -> None:
    cursor = read(3)
    cursor.marks[np.flatnonzero(cursor.marks)[0]] ^= 0xFF
    with pytest.raises(StateError, match="digest"):
        EpochCursor(JOB, 0).resume(EPOCH, cursor.state())


def test_other_orders_have_a_bit_for_each_sample() -> None:
    for other, at in ((JOB, 1), (replace(JOB, size=MAX_MARKED), -1)):
        cursor = read(2, other, other_at=at)
        state = cursor.state()
        assert state["done"] is not None
        after = EpochCursor(other, 0)
        after.resume(EPOCH, state)
        assert after.position == 2 * BATCH
        assert np.array_equal(after.marks, cursor.marks)


@pytest.mark.parametrize("strategy", ["shared-log", "independent", "coordl", "joader"])
def test_what_a_group_calls_in_order_is_the_order_of_seed_and_epoch(strategy: str) -> None:
    size, order = 500, epoch_order(500, 3 + 2)[:]
    group = sampling_group(strategy, size)
    group.join("job", seed=3)
    for done, is_first in ((order[:0], True), (order[:40], True), (order[-40:], False)):
        group.start_epoch("job", 2, done=done)
        drawn = [*done.tolist(), *group.next("job", 100).tolist()]
        known = group.in_order("job")
        assert drawn[:known] == order[:known].tolist()
        assert known == (len(done) + 100 if is_first and strategy in ("shared-log", "independent") else 0)
    group.join("part", np.arange(100), seed=3)
    group.start_epoch("part", 2)
    group.next("part", 10)
    assert group.in_order("part") == 0
