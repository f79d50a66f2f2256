"""Calls between a server and its clients, over real transports."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from tests.shared_cluster import wait
from torch_dpflow.cluster.security.connection_file import generate_keys
from torch_dpflow.errors import (
    DeadlineError,
    ErrorKind,
    MessageError,
    OptionError,
    OptionTypeError,
    PeerLostError,
    RemoteCallError,
    StateError,
)
from torch_dpflow.ipc.messages.fields import StaleRoutingError
from torch_dpflow.ipc.messages.headers import Reply, decode
from torch_dpflow.ipc.rpc import (
    LATER,
    ClientOptions,
    IncomingCall,
    Later,
    Result,
    RpcClient,
    RpcServer,
    ServerOptions,
)
from torch_dpflow.ipc.transport import TransportOptions

StartServer = Callable[..., RpcServer]
OpenClient = Callable[..., RpcClient]


class Query(msgspec.Struct):
    key: int
    name: str = "x"


def echo(call: IncomingCall) -> Result:
    return Result(call.body, call.frames)


def fail(call: IncomingCall) -> Result:
    raise KeyError(f"no sample {call.body}")


def refuse(call: IncomingCall) -> Result:
    raise OptionError("no")


def find_stale(call: IncomingCall) -> Result:
    raise StaleRoutingError("ask for the table")


def prepare(server: RpcServer) -> None:
    server.register("echo", echo)
    server.register("refuse", refuse)
    server.register("stale", find_stale)
    server.register("fail", fail)
    server.register("typed", lambda call: Result(call.body.key), body_type=Query)
    server.register("nothing", lambda call: None)
    server.register("strange", lambda call: {"not": "a Result"})
    server.register("unsendable", lambda call: Result(object()))
    server.register("whoami", lambda call: Result(call.client))


@pytest.fixture
def client(address: str, start_server: StartServer, open_client: OpenClient) -> RpcClient:
    return open_client(start_server(address, prepare).address)


@pytest.mark.parametrize("body", [None, 1, "text", b"bytes", [1, [2, {"a": 3}]], {"k": [1.5, None, True]}])
def test_body_returns_as_it_went(client: RpcClient, body: Any) -> None:
    assert client.call("echo", body) == (body, [])


@pytest.mark.parametrize("sizes", [[0], [1, 0, 5], [40_000], [100, 500_000, 7, 32_768, 3_000_000]])
def test_frames_return_as_they_went_and_are_writable(client: RpcClient, sizes: list[int]) -> None:
    frames = [os.urandom(size) for size in sizes]
    for _ in range(3):  # the first may go another way than the rest: before the two have met
        answer = client.call("echo", "body", frames)
        assert [bytes(frame) for frame in answer.frames] == frames
        for frame in answer.frames:
            frame[:1] = b"\x00"[: frame.nbytes]


def test_answers_meet_their_calls_when_many_are_open(client: RpcClient) -> None:
    pending = [client.begin("echo", number, [b"%d" % number]) for number in range(100)]
    for number, call in reversed(list(enumerate(pending))):
        answer = call.result()
        assert (answer.body, bytes(answer.frames[0])) == (number, b"%d" % number)
        assert call.wait(0.0)


def test_threads_share_a_client(client: RpcClient) -> None:
    def work(thread: int) -> list[Any]:
        return [client.call("echo", [thread, number]).body for number in range(50)]

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert results == [[[thread, number] for number in range(50)] for thread in range(6)]


def test_a_servers_own_failure_is_told_apart_and_comes_with_its_traceback(client: RpcClient) -> None:
    with pytest.raises(RemoteCallError, match=r"the service's fault(?s:.*)KeyError: 'no sample 7'") as caught:
        client.call("fail", 7)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert "Traceback (most recent call last)" in caught.value.text
    assert __file__ in caught.value.text
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.kind, str(again)) == (ErrorKind.INTERNAL, str(caught.value))
    assert client.call("echo", "still there").body == "still there"


@pytest.mark.parametrize(
    ("method", "body", "kind"),
    [
        ("absent", None, ErrorKind.USAGE),
        ("refuse", None, ErrorKind.USAGE),
        ("stale", None, ErrorKind.STALE_ROUTING),
        ("typed", {"key": "seven"}, ErrorKind.MALFORMED),
        ("typed", None, ErrorKind.MALFORMED),
        ("strange", None, ErrorKind.INTERNAL),
        ("unsendable", None, ErrorKind.INTERNAL),
    ],
)
def test_call_that_cannot_be_served_is_answered(client: RpcClient, method: str, body: Any, kind: ErrorKind) -> None:
    with pytest.raises(RemoteCallError) as caught:
        client.call(method, body)
    assert caught.value.kind is kind


def test_bodies_are_typed_on_both_sides(client: RpcClient) -> None:
    assert client.call("typed", Query(5), reply_type=int).body == 5
    assert client.call("echo", Query(5), reply_type=Query).body == Query(5)
    assert client.call("nothing").body is None
    with pytest.raises(MessageError, match="Expected `int`"):
        client.call("echo", "five", reply_type=int)


def test_call_answered_later_in_another_thread_holds_up_no_other(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    held: list[IncomingCall] = []
    arrived = threading.Event()

    def hold(call: IncomingCall) -> Later:
        held.append(call)
        arrived.set()
        return LATER

    def prepare_holding(server: RpcServer) -> None:
        prepare(server)
        server.register("hold", hold)

    client = open_client(start_server(address, prepare_holding).address)
    slow = client.begin("hold", "slow", [b"payload"])
    assert client.call("echo", "quick").body == "quick"
    assert arrived.wait(150)
    assert not slow.wait(0.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held[0].answer, "done", held[0].frames).result()
        pool.submit(held[0].fail, RuntimeError("too late")).result()
    answer = slow.result()
    assert (answer.body, bytes(answer.frames[0])) == ("done", b"payload")


def test_calls_over_tcp_with_keys(start_server: StartServer, open_client: OpenClient) -> None:
    cluster = generate_keys("tcp://127.0.0.1:0")
    keys = TransportOptions(keys=cluster.server_keys())
    server = start_server("tcp://127.0.0.1:0", prepare, transport=keys)
    friend = open_client(server.address, transport=TransportOptions(keys=cluster.client_keys()))
    stranger = open_client(server.address, transport=TransportOptions(send_timeout_s=0.05))
    with pytest.raises((DeadlineError, PeerLostError)):
        stranger.call("echo", "let me in", timeout_s=0.2)
    assert friend.call("echo", "hello", [bytes(100_000)]).body == "hello"
    assert server.stats().clients == 1
    assert server.stats().without_session == 0


def test_deadline_passes_where_nobody_listens(ipc_address: str, open_client: OpenClient) -> None:
    client = open_client(ipc_address)
    with pytest.raises(DeadlineError, match=r"'echo' at ipc://.* was not answered within 0.05 s"):
        client.call("echo", timeout_s=0.05)


def test_deadline_of_one_call_leaves_the_next_alone(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    def prepare_silent(server: RpcServer) -> None:
        prepare(server)
        server.register("silent", lambda call: LATER)

    server = start_server(address, prepare_silent)
    client = open_client(server.address)
    with pytest.raises(DeadlineError):
        client.call("silent", timeout_s=0.05)
    assert client.call("echo", 1).body == 1


def test_call_beyond_a_limit_fails_at_once(address: str, start_server: StartServer, open_client: OpenClient) -> None:
    limits = TransportOptions(max_frames=4)
    client = open_client(start_server(address, prepare, transport=limits).address, transport=limits)
    with pytest.raises(MessageError, match="max_frames"):
        client.call("echo", None, [b"x"] * 4)
    with pytest.raises(MessageError, match="let bulk travel in payload frames"):
        client.call("echo", bytes(9_000_000))
    assert client.call("echo", None, [b"x"] * 3).frames


def test_answer_beyond_a_limit_is_answered_as_an_error(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    def prepare_many(server: RpcServer) -> None:
        server.register("many", lambda call: Result(None, [b"x"] * 9))

    server = start_server(address, prepare_many, transport=TransportOptions(max_frames=4))
    with pytest.raises(RemoteCallError, match="max_frames") as caught:
        open_client(server.address).call("many")
    assert caught.value.kind is ErrorKind.MALFORMED


def test_a_call_is_executed_once_where_nothing_is_lost(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server(address, prepare)
    client = open_client(server.address)
    for number in range(50):
        client.call("echo", number, [bytes(10_000)])
    stats = server.stats()
    assert (stats.calls, stats.repeats, stats.malformed, stats.clients) == (50, 0, 0, 1)


def test_closed_client_says_so_to_whoever_waits(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    waiting = threading.Event()

    def silent(call: IncomingCall) -> Later:
        waiting.set()
        return LATER

    client = open_client(start_server(address, lambda server: server.register("silent", silent)).address)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.call, "silent") for _ in range(2)]
        assert waiting.wait(150)
        client.close()
        for call in calls:
            with pytest.raises(PeerLostError, match="was closed"):
                call.result(150)
    with pytest.raises(PeerLostError, match="was closed"):
        client.call("silent")
    client.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_cannot_use_the_client(client: RpcClient) -> None:
    assert client.call("echo", 1).body == 1
    child = os.fork()
    if child == 0:
        try:
            client.call("echo", 2, timeout_s=5)
        except StateError:
            client.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert client.call("echo", 3).body == 3


def test_shared_memory_is_used_and_returned(
    ipc_address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server(ipc_address, prepare, shared_bytes=4_000_000)
    client = open_client(server.address, shared_bytes=4_000_000)
    client.call("echo")
    kept = client.call("echo", None, [b"k" * 500_000]).frames[0]
    for number in range(50):  # far more than fits, if nothing came back
        content = bytes([number]) * 600_000
        assert bytes(client.call("echo", None, [content, b"small"]).frames[0]) == content
    carrier = client._session._carrier
    assert carrier.shares
    assert carrier._arena is not None
    assert 0 < carrier._arena.allocated_bytes <= 4_000_000
    assert bytes(kept) == b"k" * 500_000


def test_frames_too_large_for_the_shared_memory_go_through_the_socket(
    ipc_address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server(ipc_address, prepare, shared_bytes=100_000)
    client = open_client(server.address, shared_bytes=100_000)
    for size in (50_000, 1_000_000, 50_000):
        assert bytes(client.call("echo", None, [bytes(size)]).frames[0]) == bytes(size)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClientOptions(timeout_s=0),
        lambda: ClientOptions(shared_bytes=-1),
        lambda: ServerOptions(max_open_calls=0),
        lambda: ServerOptions(idle_s=0),
        lambda: TransportOptions(max_frames=0),
        lambda: TransportOptions(queue_messages=1.5),
        lambda: TransportOptions(reconnect_s=(1.0, 0.5)),
        lambda: TransportOptions(silence_s=0),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises((OptionError, OptionTypeError)):
        make()


def test_a_call_that_exceeds_a_limit_fails_in_its_own_thread_at_once_and_no_other_does(
    ipc_address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    """While one thread waits for an answer, it sends what all threads have queued."""
    waiting: list[IncomingCall] = []

    def slow(call: IncomingCall) -> Later:
        waiting.append(call)
        return LATER

    def register(server: RpcServer) -> None:
        prepare(server)
        server.register("slow", slow)

    start_server(ipc_address, register)
    client = open_client(ipc_address, timeout_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.call, "slow")
        wait(lambda: waiting, what="the slow call")
        with pytest.raises(MessageError, match="a message of 5001 frames: max_frames allows 1 to"):
            client.call("echo", None, [b""] * 5000)
        assert client.call("echo", 3).body == 3
        waiting[0].answer("done")
        assert first.result().body == "done"


def test_a_call_that_begins_while_another_thread_takes_its_answer_is_sent(
    ipc_address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    arrived = threading.Event()

    def note(call: IncomingCall) -> None:
        arrived.set()

    def register(server: RpcServer) -> None:
        prepare(server)
        server.register("note", note)

    start_server(ipc_address, register)
    client = open_client(ipc_address, timeout_s=60.0)
    receive, replies = client._connection.receive, 0

    def receive_and_wait(timeout_s: float | None) -> list[memoryview] | None:
        """Between the answer and the lock another thread begins a call."""
        nonlocal replies
        message = receive(timeout_s)
        if message is not None and isinstance(decode(message[0]), Reply):
            replies += 1
            with ThreadPoolExecutor(1) as pool:
                pool.submit(client.begin, "note").result()
        return message

    client._connection.receive = receive_and_wait  # type: ignore[method-assign]
    assert client.call("echo", 1).body == 1
    assert replies == 1
    assert arrived.wait(150), "the call was not sent, and no other call followed"
