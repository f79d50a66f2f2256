"""Whose turn it is to send: everybody's in the end, and so many at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.pool.planning.send_turns import SendTurns

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "next", "sent", "done", "again", "drop"]),
        st.integers(0, 5),
        st.floats(0, 0.7),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 3))
def test_any_interleaving_keeps_order_and_limit(steps: list[tuple[str, int, float]], most: int) -> None:
    turns = SendTurns[int](most=most, stall_s=1.0)
    line, sending, now = list[int](), dict[int, float](), 0.0
    for what, lane, later in steps:
        now += later
        match what:
            case "add":
                turns.add(lane)
                if lane not in line and lane not in sending:
                    line.append(lane)
            case "next":
                busy = sum(now - since < 1.0 for since in sending.values())
                expected = line.pop(0) if line and busy < most else None
                assert turns.next(now) == expected
                if expected is not None:
                    sending[expected] = now
            case "sent":
                turns.sent(lane, now)
                if lane in sending:
                    sending[lane] = now
            case "done" | "again":
                if sending.pop(lane, None) is not None:
                    turns.done(lane, more=what == "again")
                    line += [lane] * (what == "again")
            case "drop":
                turns.drop(lane)
                sending.pop(lane, None)
                line = [one for one in line if one != lane]
        turns.validate()
        assert len(turns) == len(line)


def test_turns_go_round() -> None:
    turns = SendTurns[str](most=1)
    for lane in "abc":
        turns.add(lane)
    order = ""
    for _ in range(9):
        lane = turns.next(0.0)
        assert lane is not None
        order += lane
        assert turns.next(0.0) is None  # one at a time
        turns.done(lane, more=True)
    assert order == "abc" * 3


def test_a_lane_that_takes_nothing_keeps_nobody_from_their_turn() -> None:
    turns = SendTurns[str](most=1, stall_s=1.0)
    for lane in "ab":
        turns.add(lane)
    assert turns.next(0.0) == "a"
    assert (turns.next(0.9), turns.has_room(0.9)) == (None, False)
    assert turns.next(1.0) == "b"
    turns.done("a", more=True)
    turns.done("b", more=False)
    assert turns.next(1.0) == "a"
