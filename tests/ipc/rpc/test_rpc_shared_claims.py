"""What a client claims about its shared memory costs a server nothing, however large it is."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator

import pytest

from torch_dpflow.ipc.messages.headers import (
    PROTOCOL_VERSION,
    BlockRef,
    Handshake,
    PayloadOffer,
    ProbeRef,
    encode,
    encode_body,
)
from torch_dpflow.ipc.rpc import RpcClient, RpcServer
from torch_dpflow.ipc.transport import connect

TOKEN = bytes(16)


@pytest.fixture
def sparse() -> Iterator[Callable[[int], int]]:
    """Make a sealed segment of so many bytes of payload, of which none but the header is there."""
    made = []

    def make(capacity: int) -> int:
        fd = os.memfd_create("claim", os.MFD_ALLOW_SEALING)
        made.append(fd)
        os.ftruncate(fd, 64 + capacity)
        os.pwrite(fd, struct.pack("<B7x8sQQ16s", 1, b"dpflow1\n", 1, capacity, TOKEN), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd

    yield make
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize(("capacity", "nbytes"), [(1 << 47, 16), (1 << 40, 1 << 40)], ids=["mapped", "copied"])
def test_a_huge_sparse_probe_harms_nobody(
    ipc_address: str,
    start_server: Callable[..., RpcServer],
    open_client: Callable[..., RpcClient],
    sparse: Callable[[int], int],
    capacity: int,
    nbytes: int,
) -> None:
    server = start_server(ipc_address, lambda server: server.register("echo", lambda call: None))
    claim = ProbeRef(TOKEN, BlockRef(1, sparse(capacity), capacity, nbytes, 1, 0))
    fiend = connect(server.address)
    fiend.send([encode(Handshake(PROTOCOL_VERSION, PayloadOffer(os.getpid(), False, encode_body(claim))))])
    assert fiend.receive(30.0) is not None  # Welcome, and nothing of it is read
    assert open_client(server.address).call("echo").frames == []
    fiend.close()
