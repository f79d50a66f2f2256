"""Every transport of ours keeps the contract."""

import signal
import sys
import uuid
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.contracts.transports import TransportContract
from torch_dpflow.cluster.security.connection_file import generate_keys
from torch_dpflow.ipc.transport import TransportOptions, connect, listen
from torch_dpflow.ipc.transport.zeromq import ZeroMQListener

_CLUSTER = generate_keys("tcp://127.0.0.1:0")


class TestIpc(TransportContract):
    def new_address(self, tmp_path: Path) -> str:
        return f"ipc://{tmp_path}/{uuid.uuid4().hex[:8]}"


class TestTcp(TransportContract):
    def new_address(self, tmp_path: Path) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpWithCurve(TransportContract):
    listener_options = TransportOptions(keys=_CLUSTER.server_keys())
    connection_options = TransportOptions(keys=_CLUSTER.client_keys())

    def new_address(self, tmp_path: Path) -> str:
        return "tcp://127.0.0.1:0"


@pytest.mark.parametrize("kind", ["listener", "connection"])
def test_a_signal_handler_may_wake_an_endpoint_that_is_being_closed(kind: str, tmp_path: Path) -> None:
    """Between any two steps of `close`: services call `wake` to stop."""
    address = f"ipc://{tmp_path}/socket"
    endpoint = listen(address) if kind == "listener" else connect(address)
    handled: list[int] = []

    def handle(*_: object) -> None:
        endpoint.wake()
        handled.append(1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name == "close":
            signal.raise_signal(signal.SIGUSR1)
            return trace
        return None

    previous = signal.signal(signal.SIGUSR1, handle)
    sys.settrace(trace)
    try:
        endpoint.close()
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, previous)
    assert len(handled) >= 4


def test_one_wait_serves_two_listeners_until_the_messages_of_both_are_taken(tmp_path: Path) -> None:
    with closing(listen(f"ipc://{tmp_path}/one")) as one, closing(listen(f"ipc://{tmp_path}/other")) as other:
        assert isinstance(other, ZeroMQListener)
        for source in other.sources:
            one.watch(source)
        with closing(connect(other.address)) as connection:
            connection.send([b"first"])
            connection.send([b"second"])
            for text in (b"first", b"second"):
                assert one.receive(None) is None  # it says so as long as a message waits
                message = other.receive(0)
                assert message is not None
                assert bytes(message[1][0]) == text
                assert other.send(message[0], [b"an answer does not hide the next message"])
