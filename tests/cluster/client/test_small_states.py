"""The state of a job of a large flow is small where its order follows from seed and epoch."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from torch_dpflow.cluster.client.epoch_cursor import MAX_MARKED, EpochCursor, check_resumable
from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.control.joint_order import Held, JointOrder
from torch_dpflow.errors import StateError
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.passes import RankShares

SIZE, EPOCH, BATCH = 2_000_003, 4, 1000
JOB = JobDescription(flow="f", version=1, name="job", seed=9, size=SIZE, batch_size=BATCH, strategy="independent")


def read(batches: int, job: JobDescription = JOB) -> EpochCursor:
    """Return the position after so many batches, as a router draws them."""
    group = sampling_group("independent", job.size)
    group.join("job", seed=job.seed)
    order = JointOrder(group, "job", RankShares(job.size, 1, False))
    order.start(0, [Held(EPOCH)])
    cursor = EpochCursor(job, EPOCH)
    cursor.follows_router = True
    for position in range(0, batches * BATCH, BATCH):
        cursor.add(order.draw(0, EPOCH, position, BATCH).tolist(), position + BATCH)
    return cursor


@pytest.mark.parametrize("batches", [0, 1, 150])
def test_it_resumes_what_was_read(batches: int) -> None:
    before = read(batches)
    state = before.state()
    assert len(json.dumps(state)) <= 64 << 10
    check_resumable(state, 1)
    after = EpochCursor(JOB, 0)
    after.resume(EPOCH, json.loads(json.dumps(state)))
    assert (after.epoch, after.position) == (EPOCH, batches * BATCH)
    assert np.array_equal(after.marks, before.marks)


def test_samples_that_are_not_the_first_of_the_order_are_refused() -> None:
    cursor = read(3)
    cursor.marks[np.flatnonzero(cursor.marks)[0]] ^= 0xFF
    with pytest.raises(StateError, match="digest"):
        EpochCursor(JOB, 0).resume(EPOCH, cursor.state())


def test_other_orders_have_a_bit_for_each_sample() -> None:
    for other in (replace(JOB, strategy="shared-log"), replace(JOB, size=MAX_MARKED)):
        state = read(2, other).state()
        assert state["done"] is not None
        after = EpochCursor(other, 0)
        after.resume(EPOCH, state)
        assert after.position == 2 * BATCH
