"""Servers and clients that die, fall silent, or are of another release."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torch_dpflow.errors import DeadlineError, MessageError
from torch_dpflow.ipc.messages.headers import PROTOCOL_VERSION, Handshake, Header, PayloadOffer, Welcome, decode, encode
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcClient, RpcServer
from torch_dpflow.ipc.transport import connect, listen

StartServer = Callable[..., RpcServer]
OpenClient = Callable[..., RpcClient]
processes = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def serve(address: str, pipe: Pipe, answering: bool) -> None:
    """A server process that says where it listens, and when a call has come."""
    server = RpcServer(listen(address))

    def work(call: IncomingCall) -> Result | Later:
        pipe.send("called")
        return Result([os.getpid(), call.body], call.frames) if answering else LATER

    server.register("work", work)
    pipe.send(server.address)
    server.serve()


def start(address: str, *, answering: bool) -> tuple[Any, Pipe, str]:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=serve, args=(address, theirs, answering))
    process.start()
    theirs.close()
    assert ours.poll(60)
    return process, ours, ours.recv()


def kill(process: Any) -> None:
    process.kill()
    process.join()
    process.close()


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_call_when_the_server_is_killed_and_restarted(scheme: str, tmp_path: Path, open_client: OpenClient) -> None:
    first, pipe, address = start(f"ipc://{tmp_path}/rpc" if scheme == "ipc" else "tcp://127.0.0.1:0", answering=False)
    client = open_client(address, inquire_s=0.1)
    call = client.begin("work", "task", [b"payload" * 10_000])
    assert pipe.poll(60)
    kill(first)
    pipe.close()
    second, pipe, _ = start(address, answering=True)
    try:
        answer = call.result()
        assert answer.body == [second.pid, "task"]
        assert bytes(answer.frames[0]) == b"payload" * 10_000
        assert client.stats().repeats >= 1
        assert pipe.recv() == "called"
    finally:
        kill(second)
        pipe.close()


def test_stopped_server_answers_once_it_goes_on(tmp_path: Path, open_client: OpenClient) -> None:
    process, pipe, address = start(f"ipc://{tmp_path}/rpc", answering=True)
    client = open_client(address, inquire_s=0.05)
    assert client.call("work", 0).body == [process.pid, 0]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"was not answered within 0\.3 s"):
            client.call("work", 0, timeout_s=0.3)
        call = client.begin("work", 1)
        os.kill(process.pid, signal.SIGCONT)
        assert call.result().body == [process.pid, 1]
    finally:
        kill(process)
        pipe.close()


@pytest.fixture(params=["as ours", "with more fields"])
def later(request: pytest.FixtureRequest) -> Callable[[Header], bytes]:
    """Encodes a greeting as a later release may."""
    more = ["what this release does not know"] if request.param == "with more fields" else []
    return lambda header: msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(header)), *more])


def test_release_that_speaks_another_version_is_refused(
    ipc_address: str, open_client: OpenClient, later: Callable[[Header], bytes]
) -> None:
    listener = listen(ipc_address)
    client = open_client(ipc_address)
    call = client.begin("anything")
    message = listener.receive(60)
    assert message is not None
    assert listener.send(message[0], [later(Welcome(99, PayloadOffer(1)))])
    with pytest.raises(MessageError, match="has version 99 of the protocol"):
        call.result()
    listener.close()


def test_client_of_another_version_is_told_and_not_admitted(
    ipc_address: str, start_server: StartServer, later: Callable[[Header], bytes]
) -> None:
    server = start_server(ipc_address, lambda server: None)
    other = connect(server.address)
    other.send([later(Handshake(99, PayloadOffer(os.getpid())))])
    answer = other.receive(60)
    assert answer is not None
    header = decode(answer[0])
    assert isinstance(header, Welcome)
    assert header.version == PROTOCOL_VERSION
    other.close()
    assert server.stats().clients == 0
