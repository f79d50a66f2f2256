"""Calls and streams over a network that loses messages, with a server that restarts: no socket, no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_dpflow.errors import PeerLostError
from torch_dpflow.remote.messages import body_decoder, encode_body
from torch_dpflow.remote.rpc import (
    IncomingCall,
    IncomingStream,
    Result,
    RpcServer,
    ServerOptions,
    StreamHandler,
)
from torch_dpflow.remote.rpc.client_session import Awaited, ClientSession, StreamEnd
from torch_dpflow.remote.rpc.payload import Carrier
from torch_dpflow.remote.transport import Frame

ANY = body_decoder(int | None)
PATIENCE_S = 1.0


class Wire:
    """A listener whose messages wait until they are delivered, or are lost."""

    address = "inproc://wire"
    dropped = 0

    def __init__(self) -> None:
        self.inbound: deque[list[memoryview]] = deque()
        self.outbound: deque[list[memoryview]] = deque()

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        return (b"client", self.inbound.popleft()) if self.inbound else None

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        self.outbound.append([memoryview(bytearray(frame)) for frame in frames])
        return True

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Feed(StreamHandler):
    """Sends back every number that it gets, plus one, and ends when the client has."""

    def __init__(self, stream: IncomingStream) -> None:
        self.stream = stream
        self.due: deque[int] = deque()
        self.closing = False

    def received(self, body: int, frames: list[memoryview]) -> None:
        self.due.append(body + 1)
        self.writable()

    def ended(self) -> None:
        self.closing = True
        self.writable()

    def writable(self) -> None:
        while self.due and self.stream.credit:
            self.stream.send(self.due.popleft())
        if self.closing and not self.due:
            self.stream.end()


class LossyCalls(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.client = ClientSession("inproc://wire", self.carrier)
        self.to_server: deque[list[memoryview]] = deque()
        self.calls: dict[int, Awaited] = {}
        self.executed: Counter[tuple[int, int]] = Counter()
        self.streams: list[tuple[StreamEnd, list[int], list[int]]] = []
        self.incarnation = 0
        self.start_server()

    @staticmethod
    def carrier() -> Carrier:
        return Carrier(max_bytes=1 << 20, shared_bytes=0, compress=True)

    def start_server(self) -> None:
        self.incarnation += 1
        self.wire = Wire()
        self.server = RpcServer(
            self.wire, options=ServerOptions(max_clients=1, window=2), clock=lambda: self.now
        )
        self.server.register("double", self.double, body_type=int)
        self.server.register_stream("feed", Feed, item_type=int)

    def double(self, call: IncomingCall) -> Result:
        self.executed[self.incarnation, call.body] += 1
        return Result(call.body * 2, call.frames)

    def flush(self) -> None:
        for frames in self.client.outbox:
            self.to_server.append([memoryview(bytearray(frame)) for frame in frames])
        self.client.outbox.clear()

    @rule()
    def call(self) -> None:
        number = len(self.calls)
        self.calls[number] = self.client.begin_call(
            "double", encode_body(number), [bytes(5_000)], ANY, now=self.now, timeout_s=1e6
        )

    @rule()
    def open(self) -> None:
        stream = self.client.open_stream("feed", encode_body(None), (), ANY, window=2)
        self.streams.append((stream, [], []))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        stream, sent, _ = data.draw(st.sampled_from(self.streams))
        if stream.state.credit:
            self.client.send_item(stream, encode_body(len(sent)), ())
            sent.append(len(sent))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        stream, _, got = data.draw(st.sampled_from(self.streams))
        if stream.inbox:
            got.append(self.client.take_item(stream).body)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.client.end_stream(data.draw(st.sampled_from(self.streams))[0])

    @rule(count=st.integers(1, 5))
    def serve(self, count: int) -> None:
        self.flush()
        for _ in range(min(count, len(self.to_server))):
            self.wire.inbound.append(self.to_server.popleft())
            assert self.server.step(0)

    @rule(count=st.integers(1, 5))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.wire.outbound))):
            self.client.on_message(self.wire.outbound.popleft(), self.now)

    @rule()
    def disconnect(self) -> None:
        self.flush()
        self.to_server.clear()
        self.wire.outbound.clear()

    @rule()
    def restart_server(self) -> None:
        self.server.close()
        self.disconnect()
        self.start_server()

    @rule()
    def forget_the_client(self) -> None:
        self.server._sessions.clear()

    @rule()
    def wait(self) -> None:
        self.now += PATIENCE_S
        self.client.inquire(self.now, PATIENCE_S / 2)

    @invariant()
    def executed_once_by_each_server_that_remembers(self) -> None:
        for awaited in self.calls.values():
            assert awaited.error is None

    @invariant()
    def streams_are_in_order(self) -> None:
        for _, sent, got in self.streams:
            assert got == [number + 1 for number in sent[: len(got)]]

    def teardown(self) -> None:
        # With a network that works again, every call is answered, and no stream hangs.
        for _ in range(12):
            self.wait()
            self.serve(count=10_000)
            self.answer(count=10_000)
            for stream, _, got in self.streams:
                while stream.inbox:
                    got.append(self.client.take_item(stream).body)
                self.client.end_stream(stream)
        for number, awaited in self.calls.items():
            assert awaited.answer is not None
            assert awaited.answer.body == number * 2
            assert [bytes(frame) for frame in awaited.answer.frames] == [bytes(5_000)]
        for stream, sent, got in self.streams:
            assert stream.state.over
            assert stream.state.error is not None or len(got) == len(sent)
        assert not self.client.streams
        assert not self.client.waiting
        assert self.client.stats.malformed == 0
        assert self.server.stats().malformed == 0
        assert self.server.stats().streams == 0


TestLossyCalls = LossyCalls.TestCase
TestLossyCalls.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


class LossyCallsOfOneServer(LossyCalls):
    """Without restarts and eviction, a call is executed once, however often it is repeated."""

    @rule()
    def restart_server(self) -> None:
        pass

    @rule()
    def forget_the_client(self) -> None:
        pass

    def teardown(self) -> None:
        super().teardown()
        assert set(self.executed.values()) <= {1}
        assert len(self.executed) == len(self.calls)


TestLossyCallsOfOneServer = LossyCallsOfOneServer.TestCase
TestLossyCallsOfOneServer.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_streams_of_a_server_that_restarts_are_lost_and_its_calls_are_not() -> None:
    machine = LossyCalls()
    machine.open()
    machine.call()
    machine.serve(count=10)
    machine.answer(count=10)
    stream = machine.streams[0][0]
    assert stream.state.credit == 2
    machine.call()
    machine.restart_server()
    machine.teardown()
    assert isinstance(stream.state.error, PeerLostError)
    assert machine.client.stats.server_restarts == 1
