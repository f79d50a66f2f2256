"""The pure parts of rpc: open calls, sessions."""

from __future__ import annotations

import pytest

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import DeadlineError
from torch_dpflow.ipc.messages.fields import OverloadedError
from torch_dpflow.ipc.messages.headers import EMPTY_BODY, Inquiry, Missing, Request, decode, encode
from torch_dpflow.ipc.rpc.call_service import Session, SessionTable
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.client_session import Call, ClientSession

# --- open calls ---


def make_carrier() -> Carrier:
    return Carrier(max_bytes=1, shared_bytes=0, compress=False)


def begin(client: ClientSession, now: float) -> Call:
    return client.begin_call("m", EMPTY_BODY, (), msgpack_decoder(None), now=now, timeout_s=10)


def sent(client: ClientSession) -> list[object]:
    """Return the messages that the client sends now."""
    outbox, client.outbox = client.outbox, []
    return [decode(message[0]) for message in outbox]


def test_calls_that_wait_for_long_are_inquired_about_and_sent_once_for_each_inquiry() -> None:
    client = ClientSession("ipc://a", make_carrier)
    old, young = begin(client, now=1.0), begin(client, now=3.0)
    sent(client)
    client.inquire(3.5, 1.0)
    assert Inquiry([old.id]) in sent(client)
    missing = [memoryview(encode(Missing(call.id))) for call in (old, young)]
    for message in (*missing, missing[0]):
        client.on_message([message], 3.5)
    assert [one.call for one in sent(client) if isinstance(one, Request)] == [old.id]
    client.inquire(11.5, 1.0)
    with pytest.raises(DeadlineError):
        old.outcome()
    assert [*client.open] == [young.id]


# --- sessions ---


def make_session(client: bytes, sent: list[bytes], *, reachable: bool = True) -> Session:
    def send(peer: bytes, frames: object) -> bool:
        sent.append(peer)
        return reachable

    return Session(client, make_carrier(), send)


def test_longest_silent_session_makes_room() -> None:
    table = SessionTable(most=2, idle_s=10)
    for now, client in enumerate([b"a", b"b"]):
        table.add(make_session(client, []), now)
    assert table.on_message(b"a", 2) is not None
    table.add(make_session(b"c", []), 3)
    assert table.on_message(b"b", 4) is None
    table.tick(now=12)
    assert table.get(b"a") is None
    assert table.get(b"c") is not None
    table.clear()
    assert len(table) == 0


def test_a_session_refuses_more_calls_than_may_run_but_not_for_those_whose_callers_have_gone() -> None:
    session = make_session(b"a", [])
    for number in (1, 2):
        session.begin(Request(number, "m", 5.0), 2)
    with pytest.raises(OverloadedError):
        session.begin(Request(3, "m", 5.0), 2)
    session.received_at = 6.0
    session.begin(Request(4, "m", 5.0), 2)
    assert [*session.running] == [4]
