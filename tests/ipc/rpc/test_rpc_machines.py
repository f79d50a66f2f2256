"""The pure parts of rpc: open calls, remembered replies, sessions."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_dpflow.ipc.messages.headers import EMPTY_BODY
from torch_dpflow.ipc.rpc.call_service import Session, SessionTable
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.client_session import Call, CallTable
from torch_dpflow.ipc.rpc.replies import ReplyMemory, Verdict, _Remembered

# --- open calls ---


def begin(table: CallTable, now: float = 0.0) -> Call:
    return table.begin("m", msgspec.Raw(EMPTY_BODY), (), now=now, timeout_s=10)


def test_completed_below_is_the_oldest_open_call() -> None:
    table = CallTable()
    assert table.completed_below == 1
    first, second, third = (begin(table) for _ in range(3))
    assert table.completed_below == first.id == 1
    table.finish(second.id)
    assert table.completed_below == 1
    table.finish(first.id)
    assert table.completed_below == third.id
    table.finish(third.id)
    assert table.completed_below == 4


def test_answered_lists_once_what_completed_below_does_not_tell() -> None:
    table = CallTable()
    calls = [begin(table) for _ in range(5)]
    table.finish(calls[3].id)
    table.finish(calls[1].id)
    assert sorted(table.take_answered()) == [2, 4]
    assert table.take_answered() == []
    table.finish(calls[2].id)
    table.finish(calls[0].id)
    assert table.take_answered() == []  # below it, which is 5


def test_calls_that_wait_for_long_are_found() -> None:
    table = CallTable()
    old, _young = begin(table, now=1.0), begin(table, now=3.0)
    assert table.older_than(2.0) == [old.id]
    assert table.finish(old.id) is old
    assert table.finish(old.id) is None
    assert table.older_than(2.0) == []


# --- remembered replies ---


def check_memory(memory: ReplyMemory[int]) -> None:
    """Check every invariant. Raises AssertionError."""
    remembered = {
        (name, call): entry.nbytes
        for name, record in memory._clients.items()
        for call, entry in record.calls.items()
        if isinstance(entry, _Remembered)
    }
    assert set(remembered) == set(memory._by_age)
    assert sum(remembered.values()) == memory.nbytes
    assert memory.nbytes <= memory._capacity or len(remembered) == 1
    for record in memory._clients.values():
        assert len(record.calls) <= memory._max_open
        assert all(call >= record.completed_below for call in record.calls)


class RepeatedCalls(RuleBasedStateMachine):
    """Clients that repeat, complete and forget in any order, against a plain model."""

    CAPACITY, MOST = 100, 6
    clients = st.sampled_from([b"a", b"b"])

    def __init__(self) -> None:
        super().__init__()
        self.memory: ReplyMemory[int] = ReplyMemory(capacity_bytes=self.CAPACITY, max_open=self.MOST)
        self.executed: set[tuple[bytes, int]] = set()
        self.running: list[tuple[bytes, int]] = []
        self.open: dict[bytes, set[int]] = {b"a": set(), b"b": set()}
        self.last = {b"a": 0, b"b": 0}
        self.answered: dict[bytes, list[int]] = {b"a": [], b"b": []}

    def completed_below(self, client: bytes) -> int:
        return min(self.open[client], default=self.last[client] + 1)

    def send(self, client: bytes, call: int) -> None:
        answered, self.answered[client] = self.answered[client], []
        verdict, reply = self.memory.admit(
            client, call, completed_below=self.completed_below(client), answered=answered
        )
        if verdict is Verdict.EXECUTE:
            assert (client, call) not in self.executed, "executed twice"
            self.executed.add((client, call))
            self.running.append((client, call))
        elif verdict is Verdict.REPEAT:
            assert reply == call
        elif verdict is Verdict.RUNNING:
            assert (client, call) in self.running
        elif verdict is Verdict.FORGOTTEN:
            assert (client, call) in self.executed
        elif verdict is Verdict.OVERLOADED:
            assert len(self.open[client]) > self.MOST

    @rule(client=clients)
    def call(self, client: bytes) -> None:
        self.last[client] += 1
        self.open[client].add(self.last[client])
        self.send(client, self.last[client])

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        client, call = data.draw(st.sampled_from([(c, n) for c in self.open for n in sorted(self.open[c])]))
        self.send(client, call)

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data())
    def inquire(self, data: st.DataObject) -> None:
        client, call = data.draw(st.sampled_from([(c, n) for c in self.open for n in sorted(self.open[c])]))
        verdict, reply = self.memory.look_up(client, call)
        assert (verdict is Verdict.REPEAT) == (reply is not None)
        assert (verdict is Verdict.EXECUTE) == ((client, call) not in self.executed)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), nbytes=st.integers(0, 150))
    def finish(self, data: st.DataObject, nbytes: int) -> None:
        client, call = data.draw(st.sampled_from(self.running))
        self.running.remove((client, call))
        wanted = self.memory.finish(client, call, call, nbytes=nbytes)
        assert wanted or call not in self.open[client]

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        client, call = data.draw(st.sampled_from([(c, n) for c in self.open for n in sorted(self.open[c])]))
        self.open[client].discard(call)
        self.answered[client].append(call)

    @invariant()
    def books_agree(self) -> None:
        check_memory(self.memory)


TestRepeatedCalls = RepeatedCalls.TestCase
TestRepeatedCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_reply_that_is_not_kept_is_executed_again() -> None:
    memory: ReplyMemory[str] = ReplyMemory(capacity_bytes=10, max_open=4)
    assert memory.admit(b"c", 1)[0] is Verdict.EXECUTE
    assert memory.admit(b"c", 1)[0] is Verdict.RUNNING
    assert memory.finish(b"c", 1, "answer", nbytes=3, keep=False)
    assert memory.admit(b"c", 1)[0] is Verdict.EXECUTE
    assert memory.nbytes == 0


def test_oldest_reply_makes_room_and_is_never_executed_again() -> None:
    memory: ReplyMemory[str] = ReplyMemory(capacity_bytes=10, max_open=4)
    for call in (1, 2, 3):
        memory.admit(b"c", call)
        memory.finish(b"c", call, f"answer {call}", nbytes=5)
    assert memory.admit(b"c", 1) == (Verdict.FORGOTTEN, None)
    assert memory.admit(b"c", 3) == (Verdict.REPEAT, "answer 3")
    memory.admit(b"c", 4, completed_below=4)
    assert memory.nbytes == 0
    assert memory.admit(b"c", 2) == (Verdict.COMPLETED, None)


def test_answered_calls_are_forgotten_beside_one_that_is_open() -> None:
    memory: ReplyMemory[str] = ReplyMemory(capacity_bytes=1000, max_open=3)
    memory.admit(b"c", 1)
    for call in range(2, 200):
        answered = [call - 1] if call > 2 else []
        assert memory.admit(b"c", call, completed_below=1, answered=answered)[0] is Verdict.EXECUTE
        memory.finish(b"c", call, "x", nbytes=5)
    assert memory.nbytes == 5


def test_client_with_too_much_open_is_refused_and_others_are_not() -> None:
    memory: ReplyMemory[str] = ReplyMemory(capacity_bytes=1000, max_open=2)
    verdicts = [memory.admit(b"c", call)[0] for call in (1, 2, 3)]
    assert verdicts == [Verdict.EXECUTE, Verdict.EXECUTE, Verdict.OVERLOADED]
    assert memory.admit(b"d", 1)[0] is Verdict.EXECUTE


# --- sessions ---


def make_session(client: bytes, sent: list[bytes], *, reachable: bool = True) -> Session:
    def send(peer: bytes, frames: object) -> bool:
        sent.append(peer)
        return reachable

    return Session(client, Carrier(max_bytes=1, shared_bytes=0, compress=False), send)


def test_longest_silent_session_makes_room() -> None:
    dropped: list[bytes] = []
    table = SessionTable(most=2, idle_s=10, drop=lambda session: dropped.append(session.client))
    for now, client in enumerate([b"a", b"b"]):
        table.add(make_session(client, []), now)
    assert table.on_message(b"a", 2) is not None
    table.add(make_session(b"c", []), 3)
    assert dropped == [b"b"]
    assert table.on_message(b"b", 4) is None
    table.tick(now=12)
    assert dropped == [b"b", b"a"]
    table.clear()
    assert dropped == [b"b", b"a", b"c"]
    assert len(table) == 0
