"""Whose turn it is to send: everybody's in the end, and so many at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.invariants import validate
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
    for what, connection, later in steps:
        now += later
        match what:
            case "add":
                turns.add(connection)
                if connection not in line and connection not in sending:
                    line.append(connection)
            case "next":
                busy = sum(now - since < 1.0 for since in sending.values())
                expected = line.pop(0) if line and busy < most else None
                assert turns.next(now) == expected
                if expected is not None:
                    sending[expected] = now
            case "sent":
                turns.sent(connection, now)
                if connection in sending:
                    sending[connection] = now
            case "done" | "again":
                if sending.pop(connection, None) is not None:
                    turns.done(connection, more=what == "again")
                    line += [connection] * (what == "again")
            case "drop":
                turns.drop(connection)
                sending.pop(connection, None)
                line = [one for one in line if one != connection]
        validate(turns)
        assert len(turns) == len(line)


def test_turns_go_round() -> None:
    turns = SendTurns[str](most=1)
    for connection in "abc":
        turns.add(connection)
    order = ""
    for _ in range(9):
        connection = turns.next(0.0)
        assert connection is not None
        order += connection
        assert turns.next(0.0) is None  # one at a time
        turns.done(connection, more=True)
    assert order == "abc" * 3


def test_a_data_connection_that_takes_nothing_keeps_nobody_from_their_turn() -> None:
    turns = SendTurns[str](most=1, stall_s=1.0)
    for connection in "ab":
        turns.add(connection)
    assert turns.next(0.0) == "a"
    assert (turns.next(0.9), turns.has_room(0.9)) == (None, False)
    assert turns.next(1.0) == "b"
    turns.done("a", more=True)
    turns.done("b", more=False)
    assert turns.next(1.0) == "a"
