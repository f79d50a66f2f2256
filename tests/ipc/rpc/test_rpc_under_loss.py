"""Calls over a network that loses messages, with a server that restarts: no socket, no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.ipc.messages.headers import encode_body
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcServer, ServerOptions
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.client_session import Call, ClientSession
from torch_dpflow.ipc.transport import Frame

ANY = msgpack_decoder(int | None)
PATIENCE_S = 1.0


class Wire:
    """A listener whose messages wait until they are delivered, or are lost."""

    address = "ipc://wire"
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


class LossyCalls(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.client = ClientSession("ipc://wire", self.carrier)
        self.to_server: deque[list[memoryview]] = deque()
        self.calls: dict[int, Call] = {}
        self.executed: Counter[int] = Counter()
        self.start_server()

    @staticmethod
    def carrier() -> Carrier:
        return Carrier(max_bytes=1 << 20, shared_bytes=0, compress=True)

    def start_server(self) -> None:
        self.wire = Wire()
        self.server = RpcServer(self.wire, options=ServerOptions(max_clients=1), clock=lambda: self.now)
        self.server.register("double", self.double, body_type=int)

    def double(self, call: IncomingCall) -> Result:
        self.executed[call.body] += 1
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
    def no_call_fails(self) -> None:
        for awaited in self.calls.values():
            assert awaited.error is None

    def teardown(self) -> None:
        # With a network that works again, every call is answered.
        for _ in range(12):
            self.wait()
            self.serve(count=10_000)
            self.answer(count=10_000)
        for number, awaited in self.calls.items():
            assert awaited.answer is not None
            assert awaited.answer.body == number * 2
            assert [bytes(frame) for frame in awaited.answer.frames] == [bytes(5_000)]
        assert not self.client.open
        assert self.client.stats.malformed == 0
        assert self.server.stats().malformed == 0


TestLossyCalls = LossyCalls.TestCase
TestLossyCalls.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


class DelayedCalls(LossyCalls):
    """Where no message is lost, a call is executed once, however long its answer takes."""

    @rule()
    def disconnect(self) -> None:
        pass

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


TestDelayedCalls = DelayedCalls.TestCase
TestDelayedCalls.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_calls_outlive_a_server_that_restarts() -> None:
    machine = LossyCalls()
    machine.call()
    machine.serve(count=10)
    machine.answer(count=10)
    machine.call()
    machine.restart_server()
    machine.teardown()
    assert machine.client.stats.repeats >= 1
