"""Which addresses, identities and limits a transport takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_dpflow import LoaderOptions
from torch_dpflow._core.checks import is_loopback
from torch_dpflow.errors import OptionError, TransportError
from torch_dpflow.ipc.transport import connect, listen


@pytest.mark.parametrize("address", ["", "ipc", "ipc://", "udp://127.0.0.1:1", "127.0.0.1:1", "tcp:/127.0.0.1:1"])
def test_address_of_no_transport_is_refused(address: str) -> None:
    with pytest.raises(OptionError, match=r"must be ipc://PATH or tcp://HOST:PORT"):
        listen(address)
    with pytest.raises(OptionError, match=r"must be ipc://PATH or tcp://HOST:PORT"):
        connect(address)


@pytest.mark.parametrize("identity", [b"", b"\x00zero first", b"x" * 256])
def test_identity_that_cannot_name_a_peer_is_refused(identity: bytes) -> None:
    with pytest.raises(OptionError, match="identity="):
        connect("ipc:///nowhere", identity=identity)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.8.7:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_loopback_is_told_from_the_network(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_tcp_port_that_is_free_is_chosen_and_told() -> None:
    listener = listen("tcp://127.0.0.1:0")
    assert int(listener.address.rpartition(":")[2]) > 0
    listener.close()


def test_path_that_cannot_be_had_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot listen at"):
        listen(f"ipc://{tmp_path}/{'x' * 120}")
    with pytest.raises(TransportError, match="cannot listen at"):
        listen(f"ipc://{tmp_path}/absent/socket")


def test_file_that_is_no_socket_is_not_taken_away(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(TransportError, match="no socket"):
        listen(f"ipc://{precious}")
    assert precious.read_text() == "data"


def test_socket_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/socket")
    listener = listen(f"ipc://{tmp_path}/socket")
    connection = connect(listener.address)
    connection.send([b"hello"])
    assert listener.receive(150) is not None
    connection.close()
    listener.close()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://[::1]", "tcp://h:99999", "tcp://h:a"]
)
def test_a_tcp_address_without_a_port_is_refused(address: str) -> None:
    """libzmq would listen at port 127 of all interfaces for the first."""
    for opens in (listen, connect):
        with pytest.raises(OptionError, match=r"must be tcp://HOST:PORT, with a port of 0 to 65535"):
            opens(address)
    with pytest.raises(OptionError, match="must be tcp://HOST:PORT"):
        LoaderOptions(listen=address)
