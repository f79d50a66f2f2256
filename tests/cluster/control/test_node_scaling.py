"""Number of nodes of a platform: within limits, up at once, down once fewer were enough for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.control.node_table import NodeScaling
from torch_dpflow.cluster.messages.coordinator import NodeLimits

LIMITS = NodeLimits(1, 8, 4, hold_s=10.0)
DEMANDS = st.lists(st.tuples(st.integers(0, 60), st.floats(0.0, 8.0)), min_size=1, max_size=40)


def needed(workers: int) -> int:
    return min(8, max(1, -(-workers // 4)))


@given(DEMANDS, st.integers(0, 12))
def test_nodes_are_enough_and_not_more_than_were_needed_of_late(demands: list[tuple[int, float]], running: int) -> None:
    scaling, now, history = NodeScaling(LIMITS), 0.0, [(0.0, LIMITS.clamp(running))]
    for workers, step in demands:
        now += step
        count = scaling.wanted(workers, running, now)
        history.append((now, needed(workers)))
        assert needed(workers) <= count <= max(nodes for _, nodes in history)
        # A number is given up in the first call after it was not needed for `hold_s`: at most one step later.
        assert count <= max([nodes for at, nodes in history if at >= now - 2 * LIMITS.hold_s - 16.0])
        history[-1] = now, needed(workers)


def test_nodes_stay_for_a_while_and_leave_at_once_then() -> None:
    scaling = NodeScaling(LIMITS)
    assert scaling.wanted(32, 0, 0.0) == 8
    assert scaling.wanted(4, 8, 1.0) == 8
    assert scaling.wanted(9, 8, 5.0) == 8
    assert scaling.wanted(4, 8, 10.9) == 8
    assert scaling.wanted(4, 8, 11.0) == 3, "so many were needed meanwhile"
    assert scaling.wanted(4, 3, 20.9) == 3
    assert scaling.wanted(4, 3, 21.1) == 3
    assert scaling.wanted(4, 3, 31.1) == 1


def test_a_new_coordinator_begins_with_the_nodes_that_run() -> None:
    scaling = NodeScaling(LIMITS)
    assert scaling.wanted(0, 5, 100.0) == 5
    assert scaling.wanted(0, 5, 109.0) == 5
    assert scaling.wanted(0, 5, 110.0) == 1
