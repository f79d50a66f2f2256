"""Who has not the cluster's client key gets nothing, and the service sees nothing of them."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import msgspec
import pytest

from tests.contracts.transports import TIMEOUT_S, answered, greet, next_message
from torch_dpflow.cluster.security.connection_file import (
    ConnectionFile,
    generate_keys,
    read_connection_file,
    read_key_file,
    write_connection_file,
)
from torch_dpflow.errors import OptionError, PeerLostError
from torch_dpflow.ipc.transport import Connection, Listener, TransportOptions, connect, listen
from torch_dpflow.ipc.transport.base import ClientKeys, WorkerKeys
from torch_dpflow.ipc.transport.zeromq.contexts import draw_key_pair

CLUSTER = generate_keys("tcp://127.0.0.1:0")
STRANGER = generate_keys("tcp://127.0.0.1:0")


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = listen("tcp://127.0.0.1:0", options=TransportOptions(keys=CLUSTER.server_keys()))
    yield listener
    listener.close()


def refused(listener: Listener, stranger: Connection) -> None:
    """Whatever the stranger sends, a friend who comes later is the first whom the service hears."""
    friend = connect(listener.address, options=TransportOptions(keys=CLUSTER.client_keys()))
    try:
        for _ in range(3):
            with suppress(PeerLostError):  # it may have noticed
                stranger.send([b"let me in"])
            assert listener.receive(0.1) is None
        friend.send([b"friend"])
        peer, frames = next_message(listener)
        assert (peer, bytes(frames[0])) == (friend.identity, b"friend")
        assert listener.send(peer, [b"welcome"])
        assert bytes(answered(friend)[0]) == b"welcome"
        assert not listener.send(stranger.identity, [b"secret"])
        assert stranger.receive(0) is None
    finally:
        friend.close()
        stranger.close()


def test_stranger_without_keys_is_not_heard(listener: Listener) -> None:
    refused(listener, connect(listener.address, options=TransportOptions(send_timeout_s=0.05)))


def test_stranger_with_a_key_of_his_own_is_not_heard(listener: Listener) -> None:
    theirs = STRANGER.client_keys()
    keys = ClientKeys(public=theirs.public, secret=theirs.secret, server_public=CLUSTER.server_public.encode())
    refused(listener, connect(listener.address, options=TransportOptions(keys=keys, send_timeout_s=0.05)))


def test_stranger_who_mistakes_the_server_is_not_heard(listener: Listener) -> None:
    ours = CLUSTER.client_keys()
    keys = ClientKeys(public=ours.public, secret=ours.secret, server_public=STRANGER.server_public.encode())
    refused(listener, connect(listener.address, options=TransportOptions(keys=keys, send_timeout_s=0.05)))


def test_client_with_keys_tells_nothing_to_a_server_without(listener: Listener) -> None:
    naive = listen("tcp://127.0.0.1:0")
    careful = connect(naive.address, options=TransportOptions(keys=CLUSTER.client_keys()))
    try:
        careful.send([b"secret"])
        assert naive.receive(0.3) is None
    finally:
        careful.close()
        naive.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        b"\xff" * 1000,
        b"\xff" + struct.pack(">Q", 9) + b"\x7f\x03\x00NULL" + bytes(60) + b"\x04\x05\x05READY",
        pickle.dumps(os.getpid),
    ],
)
def test_noise_on_the_port_is_not_heard_and_does_no_harm(listener: Listener, noise: bytes) -> None:
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(noise)
        assert listener.receive(0.1) is None
    friend = connect(listener.address, options=TransportOptions(keys=CLUSTER.client_keys()))
    try:
        greet(listener, friend)
    finally:
        friend.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "[::]", "eth0", "example.org"])
def test_tcp_beyond_the_host_needs_keys(host: str) -> None:
    with pytest.raises(OptionError, match="reaches beyond this host"):
        listen(f"tcp://{host}:0")
    with pytest.raises(OptionError, match="reaches beyond this host"):
        connect(f"tcp://{host}:5555")


def test_tcp_beyond_the_host_is_allowed_with_keys() -> None:
    listener = listen("tcp://0.0.0.0:0", options=TransportOptions(keys=CLUSTER.server_keys()))
    port = listener.address.rpartition(":")[2]
    friend = connect(f"tcp://127.0.0.1:{port}", options=TransportOptions(keys=CLUSTER.client_keys()))
    try:
        greet(listener, friend)
    finally:
        friend.close()
        listener.close()


def test_keys_of_the_wrong_side_are_refused() -> None:
    with pytest.raises(OptionError, match="listener needs ServerKeys"):
        listen("tcp://127.0.0.1:0", options=TransportOptions(keys=CLUSTER.client_keys()))
    with pytest.raises(OptionError, match="connection needs ClientKeys"):
        connect("tcp://127.0.0.1:5555", options=TransportOptions(keys=CLUSTER.server_keys()))


def test_keys_do_not_show_their_secret() -> None:
    assert CLUSTER.server_secret is not None
    for keys in (CLUSTER.server_keys(), CLUSTER.client_keys()):
        assert CLUSTER.server_secret not in repr(keys)
        assert CLUSTER.client_secret not in repr(keys)


# --- the connection file ---


def test_connection_file_returns_what_was_written_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    os.umask(os.umask(0))
    write_connection_file(path, CLUSTER)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_connection_file(path) == CLUSTER
    assert [entry.name for entry in tmp_path.iterdir()] == ["cluster.json"]
    write_connection_file(path, STRANGER)
    assert read_connection_file(path) == STRANGER


def test_connection_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    write_connection_file(path, CLUSTER)
    path.chmod(0o640)
    with pytest.raises(OptionError, match=r"chmod 600;.* defaultMode: 0400"):
        read_connection_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of root's")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_read"),
    [
        (0, os.getegid(), 0o440, True),
        (0, os.getegid(), 0o400, True),
        (0, os.getegid(), 0o640, False),
        (0, os.getegid(), 0o460, False),
        (0, os.getegid(), 0o444, False),
        (0, os.getegid(), 0o450, False),
        (0, 4242, 0o440, False),
        (1000, os.getegid(), 0o440, False),
        (1000, os.getegid(), 0o400, False),
    ],
)
def test_a_secret_that_is_mounted_for_a_group_is_read_by_those_in_it_alone(
    tmp_path: Path, owner: int, group: int, mode: int, is_read: bool
) -> None:
    write_connection_file(path := tmp_path / "keys.json", CLUSTER)
    os.chown(path, owner, group)
    path.chmod(mode)
    (link := tmp_path / "link").symlink_to(path.name)  # as Kubernetes has it
    refused = f"belongs to user {owner};" if owner else f"mode {mode:o}, owner 0, group {group}; it holds keys"
    for read in (read_connection_file, read_key_file):
        with nullcontext() if is_read else pytest.raises(OptionError, match=refused):
            assert read(link) == CLUSTER


def test_connection_file_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    write_connection_file(path, msgspec.structs.replace(CLUSTER, version=99))
    with pytest.raises(OptionError, match="has version 99, and this release of torch_dpflow reads 1 to 2"):
        read_connection_file(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"address": "tcp://127.0.0.1:1"}', b"\xff\xfe", b'{"version": "one"}'],
)
def test_connection_file_with_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.json"
    write_connection_file(path, CLUSTER)
    path.write_bytes(content)
    with pytest.raises(OptionError, match="not a valid one"):
        read_connection_file(path)


def test_connection_file_with_a_short_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    broken = ConnectionFile(address="tcp://h:1", server_public="short", client_public="x", client_secret="y")
    write_connection_file(path, broken)
    with pytest.raises(OptionError, match="40 bytes"):
        read_connection_file(path)


def test_connection_file_that_is_missing_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is the cluster up"):
        read_connection_file(tmp_path / "absent.json")


def test_connection_file_of_a_job_starts_no_service() -> None:
    job = ConnectionFile(
        address=CLUSTER.address,
        server_public=CLUSTER.server_public,
        client_public=CLUSTER.client_public,
        client_secret=CLUSTER.client_secret,
    )
    assert job.client_keys() == CLUSTER.client_keys()
    with pytest.raises(OptionError, match="no service can listen"):
        job.server_keys()


class WorkerListener:
    """A listener that admits workers by keys of their own, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        public, secret = draw_key_pair()
        self.keys = WorkerKeys(public=public, secret=secret, clock=lambda: self.now)
        self.listener = listen("tcp://127.0.0.1:0", options=TransportOptions(keys=self.keys))

    def expect(self, user: str, for_s: float) -> ClientKeys:
        public, secret = draw_key_pair()
        self.keys.expect(user, public, for_s)
        return ClientKeys(public=public, secret=secret, server_public=self.keys.public)

    def hears(self, identity: bytes, keys: ClientKeys) -> bool:
        """Whether a new connection with this identity is next_message."""
        with closing(connect(self.listener.address, identity=identity, options=TransportOptions(keys=keys))) as caller:
            caller.send([b"hello"])
            return self.listen(TIMEOUT_S) == identity

    def is_deaf_to(self, identity: bytes, keys: ClientKeys) -> bool:
        """Whether one that is admitted is next_message first, though it comes later."""
        stranger = connect(self.listener.address, identity=identity, options=TransportOptions(keys=keys))
        friend_keys = self.expect(f"friend-{identity!r}", 1.0)
        friend = connect(
            self.listener.address,
            identity=f"friend-{identity!r}/x".encode(),
            options=TransportOptions(keys=friend_keys),
        )
        try:
            stranger.send([b"hello"])
            if self.listen(0.3) is not None:
                return False
            friend.send([b"hello"])
            return self.listen(TIMEOUT_S) == friend.identity
        finally:
            stranger.close()
            friend.close()

    def listen(self, within_s: float) -> bytes | None:
        """Who is next_message first. A connection that ends is told of as well."""
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            message = self.listener.receive(left_s)
            if message is not None:
                return message[0]
        return None


@pytest.fixture
def worker_listener() -> Iterator[WorkerListener]:
    worker_listener = WorkerListener()
    yield worker_listener
    worker_listener.listener.close()


def test_a_worker_s_key_opens_only_until_it_is_late_or_gone(worker_listener: WorkerListener) -> None:
    keys = worker_listener.expect("1/7", 10.0)
    assert worker_listener.hears(b"1/7/a/line", keys)
    worker_listener.now = 11.0
    assert worker_listener.is_deaf_to(b"1/7/b/line", keys)  # late, and it never called
    called = worker_listener.expect("2/8", 10.0)
    worker_listener.keys.keep("2/8")
    worker_listener.now = 99.0
    assert worker_listener.hears(b"2/8/a/line", called)  # its connection may break
    worker_listener.keys.drop("2/8")
    assert worker_listener.is_deaf_to(b"2/8/b/line", called)


def test_a_worker_is_not_heard_under_another_s_name_nor_after_it_was_dropped(
    worker_listener: WorkerListener,
) -> None:
    keys, others = worker_listener.expect("1/7", 10.0), worker_listener.expect("1/77", 10.0)
    assert worker_listener.is_deaf_to(b"1/77/a/line", keys)
    assert worker_listener.is_deaf_to(b"1/7", keys)
    assert worker_listener.hears(b"1/77/b/line", others)
    worker = connect(worker_listener.listener.address, identity=b"1/7/a/line", options=TransportOptions(keys=keys))
    try:
        worker.send([b"hello"])
        assert worker_listener.listen(TIMEOUT_S) == b"1/7/a/line"
        worker_listener.keys.drop("1/7")
        worker.send([b"hello"])
        assert worker_listener.listen(0.3) is None
    finally:
        worker.close()


def test_a_listener_for_workers_counts_connections_that_end(worker_listener: WorkerListener) -> None:
    assert worker_listener.hears(b"1/7/a/line", worker_listener.expect("1/7", 10.0))
    deadline = time.monotonic() + TIMEOUT_S
    while worker_listener.listener.losses < 1:
        assert time.monotonic() < deadline
        worker_listener.listener.receive(0.1)
