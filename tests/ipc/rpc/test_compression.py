"""Compression where it pays, and no allocation on a peer's word."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
import snappy
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import Packing
from torch_dpflow.ipc.rpc.carrier import MIN_FRAME_BYTES, Carrier, compress, decompress, pays

NOISE = os.urandom(100_000)
LABELS = np.arange(20_000, dtype=np.int64).tobytes()


@pytest.mark.parametrize(
    ("content", "worthwhile"),
    [
        (LABELS, True),
        (bytes(100_000), True),
        (b"the same words " * 10_000, True),
        (NOISE, False),
        (np.random.default_rng(0).normal(size=50_000).astype(np.float32).tobytes(), False),
        (bytes(MIN_FRAME_BYTES - 1), False),
        (b"", False),
    ],
)
def test_probe_tells_what_pays(content: bytes, worthwhile: bool) -> None:
    assert pays(content) is worthwhile
    frames, sizes = compress([content])
    assert sizes == ([len(content)] if worthwhile else [])
    assert (len(frames[0]) < len(content)) is worthwhile


def test_only_what_pays_is_compressed_and_all_returns() -> None:
    frames = [b"small", LABELS, NOISE, memoryview(np.zeros((100, 100), np.float32))]
    packed, sizes = compress(frames)
    assert [size > 0 for size in sizes] == [False, True, False, True]
    restored = [
        decompress(memoryview(frame), size, limit=1 << 20) if size else memoryview(frame)
        for frame, size in zip(packed, sizes)
    ]
    assert [bytes(frame) for frame in restored] == [bytes(frame) for frame in frames]
    assert not restored[1].readonly


@given(st.binary(max_size=2_000), st.integers(0, 3_000))
def test_anything_decompresses_to_its_claim_or_is_refused(content: bytes, size: int) -> None:
    try:
        restored = decompress(memoryview(content), size, limit=2_500)
    except MessageError:
        return
    assert restored.nbytes == size <= 2_500


@pytest.mark.parametrize(
    ("frame", "size", "limit"),
    [
        (snappy.compress(bytes(10_000)), 10_000, 9_999),
        (snappy.compress(bytes(10_000)), 9_999, 1 << 20),
        (b"\xff\xff\xff\xff\x0f" + bytes(100), 2**32 - 1, 2**40),
        (b"\x80\x80\x80\x80\x80\x80", 0, 1 << 20),
        (b"", 0, 1 << 20),
        (snappy.compress(LABELS)[:-10], len(LABELS), 1 << 20),
    ],
)
def test_false_claims_are_refused_without_allocating(frame: bytes, size: int, limit: int) -> None:
    tracemalloc.start()
    with pytest.raises(MessageError, match="compressed frame"):
        decompress(memoryview(frame), size, limit=limit)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_carrier_compresses_for_a_peer_that_asks() -> None:
    near = Carrier(max_bytes=1 << 20, shared_bytes=0, compress=False)
    far = Carrier(max_bytes=1 << 20, shared_bytes=0, compress=True)
    assert not near.accept(far.offer())
    packed, packing = near.pack([LABELS, NOISE])
    assert packing == Packing([len(LABELS), 0])
    arrived = [memoryview(bytearray(frame)) for frame in packed]
    assert [bytes(frame) for frame in far.unpack(arrived, packing)] == [LABELS, NOISE]


def test_carrier_bounds_what_a_message_may_hold() -> None:
    near = Carrier(max_bytes=1 << 20, shared_bytes=0, compress=False)
    far = Carrier(max_bytes=len(LABELS) * 2, shared_bytes=0, compress=True)
    near.accept(far.offer())
    packed, packing = near.pack([LABELS] * 3)
    with pytest.raises(MessageError, match="at most"):
        far.unpack([memoryview(bytearray(frame)) for frame in packed], packing)
