"""Frames that a carrier hands over in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.ipc.memory.segment import address_of
from torch_dpflow.ipc.messages.headers import (
    PROTOCOL_VERSION,
    SHARED_BYTES,
    BlockRef,
    Handshake,
    PayloadOffer,
    ProbeRef,
    Welcome,
    decode,
    encode,
    encode_body,
)
from torch_dpflow.ipc.rpc import RpcServer
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.transport import connect, listen

#: Room for two messages of the tests below.
ROOM = 2 << 20


def pair() -> tuple[Carrier, Carrier]:
    """Two ends on this host that can read each other's memory."""
    near, far = (Carrier(max_bytes=1 << 30, shared_bytes=ROOM, compress=False) for _ in range(2))
    near.shares, far.shares = far.accept(near.offer()), near.accept(far.offer())
    return near, far


def handed_over(near: Carrier, far: Carrier, frames: list[bytes]) -> tuple[int, list[memoryview]]:
    """How many frames went over the socket, and what arrived."""
    packed, packing = near.pack(frames)
    return len(packed), far.unpack([memoryview(bytearray(frame)) for frame in packed], packing)


def test_a_handshake_that_is_repeated_takes_nothing_back(tmp_path: Path) -> None:
    """A client repeats it while its server is busy; a probe that fails by then must not undo the first."""
    near, far = pair()
    assert near.offer() == near.offer()
    assert far.accept(PayloadOffer(os.getpid()))  # nothing to probe
    assert far.accept(PayloadOffer(os.getpid(), False, encode_body(ProbeRef(b"other", BlockRef(0, 0, 0, 0, 0, 0)))))
    frames = [bytes(SHARED_BYTES)]
    assert [bytes(frame) for frame in handed_over(near, far, frames)[1]] == frames

    server = RpcServer(listen(f"ipc://{tmp_path}/server"))
    client = connect(server.address)
    for _ in range(2):
        client.send([encode(Handshake(PROTOCOL_VERSION, near.offer()))])
    welcomes: list[Welcome] = []
    while len(welcomes) < 2:
        server.step(0.1)
        answer = client.receive(0.1)
        header = None if answer is None else decode(answer[0])
        if isinstance(header, Welcome):
            welcomes.append(header)
    client.close()
    server.close()
    assert welcomes[0] == welcomes[1]


sizes = st.lists(st.integers(0, 300) | st.integers(SHARED_BYTES - 1, SHARED_BYTES + 100), max_size=8)


@given(sizes)
def test_frames_arrive_as_they_were_and_in_order(sizes: list[int]) -> None:
    near, far = pair()
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]
    _, arrived = handed_over(near, far, frames)
    assert [bytes(frame) for frame in arrived] == frames


def test_nothing_but_the_reference_takes_the_socket_where_there_is_a_large_frame() -> None:
    near, far = pair()
    sent, _ = handed_over(near, far, [b"head", bytes(SHARED_BYTES), b"head", bytes(SHARED_BYTES)])
    assert sent == 0
    sent, _ = handed_over(near, far, [b"head", b"and nothing large"])
    assert sent == 2


def test_large_frames_lie_one_behind_the_other() -> None:
    near, far = pair()
    large = bytes(SHARED_BYTES)
    _, arrived = handed_over(near, far, [b"head", large, b"head", large])
    first, second = (address_of(np.frombuffer(arrived[place], np.uint8)) for place in (1, 3))
    assert second == first + SHARED_BYTES


def test_small_frames_that_are_kept_do_not_keep_the_memory_of_the_large() -> None:
    near, far = pair()
    kept = []
    for _ in range(10):
        _, (small, large) = handed_over(near, far, [b"label", bytes(ROOM // 2)])
        kept.append(small)
        del large
        sent, _ = handed_over(near, far, [bytes(ROOM // 4)])
        assert sent == 0, "the memory has not come back"
    assert {bytes(small) for small in kept} == {b"label"}


@pytest.mark.parametrize("last", [b"", b"x"])
def test_empty_frames_keep_their_places(last: bytes) -> None:
    near, far = pair()
    frames = [b"", bytes(SHARED_BYTES), b"", last]
    _, arrived = handed_over(near, far, frames)
    assert [bytes(frame) for frame in arrived] == frames
