"""Transport of payload frames between two peers: unchanged, compressed, or in shared memory.

Each side has one `Carrier` per peer. On one host, large frames are copied into an arena and only a reference crosses
the socket, once the peer has proved that it can read the arena. Between hosts, frames are compressed by snappy if a
trial shows that they shrink: text, labels, masks and small integers do; JPEGs, noise and float images do not. All other
frames are sent unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import snappy

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import (
    SHARED_BYTES,
    BlockRef,
    Frame,
    Packing,
    PayloadOffer,
    ProbeRef,
    aligned,
    decode_body,
    encode_body,
)

if TYPE_CHECKING:
    from torch_dpflow.ipc.memory.arena import Arena
    from torch_dpflow.ipc.memory.arena_reader import ArenaReader


#: Shorter frames are not compressed, bytes: they fit into a few packets anyway.
MIN_FRAME_BYTES = 4 * 1024
#: The trial takes this many parts of this many bytes, spread evenly over the frame.
PROBES, PROBE_BYTES = 3, 4 * 1024
#: A frame is compressed if the trial shrinks to this share or less.
WORTHWHILE = 0.8
#: Snappy's best case: 3 bytes stand for 64. A frame that claims a better ratio is not snappy data.
_MAX_EXPANSION = 22


def pays(frame: Frame) -> bool:
    """Return whether to compress `frame`: it is long enough, and a trial with parts of it shrinks them enough."""
    size = memoryview(frame).nbytes
    if size < MIN_FRAME_BYTES:
        return False
    view = memoryview(frame).cast("B")
    step = (size - PROBE_BYTES) // (PROBES - 1)
    starts = sorted({position * step for position in range(PROBES)})
    sample = b"".join(view[start : start + PROBE_BYTES] for start in starts)
    return len(snappy.compress(sample)) <= WORTHWHILE * len(sample)


def compress(frames: Sequence[Frame]) -> tuple[list[Frame], list[int]]:
    """Compress the frames for which it pays. Return (frames to send, original size of each frame in bytes).

    The size is 0 for a frame that was not compressed; the list of sizes is empty if none was.
    """
    packed: list[Frame] = []
    sizes: list[int] = []
    for frame in frames:
        worthwhile = pays(frame)
        packed.append(snappy.compress(frame) if worthwhile else frame)
        sizes.append(memoryview(frame).nbytes if worthwhile else 0)
    return packed, sizes if any(sizes) else []


def decompress(frame: memoryview, size: int, *, limit: int) -> memoryview:
    """Return the content of a compressed frame, in writable memory.

    size, limit: length that the content must have, and maximum length, bytes; checked before memory is allocated.

    Raises MessageError if the frame is not snappy data, or the length that it claims is wrong or impossible.
    """
    claim = _claimed_size(frame)
    if claim != size or claim > limit or claim > _MAX_EXPANSION * frame.nbytes:
        raise MessageError(
            f"a compressed frame of {frame.nbytes} bytes claims to hold {claim}: the header says {size}, "
            f"at most {limit} are allowed"
        )
    try:
        return memoryview(bytearray(snappy.uncompress(frame)))
    except snappy.UncompressError as error:
        raise MessageError(f"a compressed frame of {frame.nbytes} bytes is no snappy data") from error


def _claimed_size(frame: memoryview) -> int:
    """Return the length at the beginning of snappy data: a varint of at most 32 bits, 7 bits per byte, lowest first."""
    claim = 0
    for position, byte in enumerate(frame[:5]):
        claim |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return claim
    raise MessageError(f"a compressed frame of {frame.nbytes} bytes does not begin with a length")


_probe_decoder = msgpack_decoder(ProbeRef | None)
_block_decoder = msgpack_decoder(BlockRef | None)


class Carrier:
    """Packing of frames to one peer, and unpacking of frames from it. Not thread-safe.

    Args:
        max_bytes: maximum bytes of one message's frames, decompressed or in shared memory.
        shared_bytes: maximum shared memory lent to this peer, bytes; 0 for a peer that may be on another host.
        compress: whether this side requests compressed payload.
    """

    def __init__(self, *, max_bytes: int = 1 << 31, shared_bytes: int, compress: bool) -> None:
        self._max_bytes = max_bytes
        self._asks_compression = compress
        self._arena = _arena(shared_bytes) if shared_bytes else None
        self._reader: ArenaReader | None = None
        self._offer: PayloadOffer | None = None
        self._peer = 0
        #: Whether the peer requested compressed payload.
        self.compresses = False
        #: Whether the peer has proved that it can read the arena.
        self.shares = False

    def offer(self) -> PayloadOffer:
        """Return this side's offer for `Handshake` or `Welcome`; the same at each call."""
        if self._offer is None:
            probe = None if self._arena is None else self._arena.probe_ref()
            self._offer = PayloadOffer(os.getpid(), self._asks_compression, encode_body(probe))
        return self._offer

    def accept(self, offer: PayloadOffer) -> bool:
        """Apply the peer's offer; return whether this side can read the peer's shared memory.

        If this side could read it already, a repeated offer is not checked again: its probe can be opened only once.

        Raises MessageError if the offer is malformed.
        """
        self.compresses = offer.compress
        probe = decode_body(offer.probe, _probe_decoder)
        if self._peer != offer.pid and probe is not None and self._arena is not None:
            reader = _reader(offer.pid)
            self._reader = reader if reader.probe(probe) else None
            self._peer = 0 if self._reader is None else offer.pid
        return self._reader is not None

    def pack(self, frames: Sequence[Frame]) -> tuple[Sequence[Frame], Packing | None]:
        """Return (frames to send, packing for the peer's `unpack`); the packing is None if the frames are unchanged."""
        if self.shares:
            return self._share(frames)
        if self.compresses:
            packed, sizes = compress(frames)
            return packed, Packing(sizes) if sizes else None
        return frames, None

    def unpack(self, frames: list[memoryview], packing: Packing | None) -> list[memoryview]:
        """Return the frames as they were before the peer packed them.

        Raises:
            MessageError: the frames do not match the packing.
            SegmentLostError: the peer's shared memory cannot be opened, in most cases because the peer has ended.
            DescriptorLimitError: this process has too many files open to map the peer's memory.
        """
        if packing is None:
            return frames
        shared = iter(self._from_block(packing))
        capacity = self._max_bytes
        unpacked: list[memoryview] = []
        arrived = iter(frames)
        try:
            for size in packing.frames:
                if size < 0:
                    unpacked.append(next(shared))
                elif size == 0:
                    unpacked.append(next(arrived))
                else:
                    unpacked.append(decompress(next(arrived), size, limit=capacity))
                    capacity -= size
        except StopIteration:
            raise MessageError(f"{len(frames)} frames came, fewer than announced: {packing.frames}") from None
        if next(arrived, None) is not None:
            raise MessageError(f"{len(frames)} frames came, more than announced: {packing.frames}")
        return unpacked

    def close(self) -> None:
        """Release the shared memory; existing views of it stay valid."""
        if self._arena is not None:
            self._arena.close()
        if self._reader is not None:
            self._reader.close()

    def _share(self, frames: Sequence[Frame]) -> tuple[Sequence[Frame], Packing | None]:
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        if self._arena is None or max(sizes, default=0) < SHARED_BYTES:
            return frames, None
        offsets, end = _places(sizes)
        block = self._arena.allocate(end)
        if block is None:
            return frames, None
        reference = msgspec.Raw(msgspec.msgpack.encode(self._arena.publish(block)))
        memory = block.memory.data
        for offset, size, frame in zip(offsets, sizes, frames):
            memory[offset : offset + size] = frame.cast("B") if isinstance(frame, memoryview) else frame
        return [frame for size, frame in zip(sizes, frames) if not size], Packing([-size for size in sizes], reference)

    def _from_block(self, packing: Packing) -> list[memoryview]:
        """Return the frames in shared memory, in order. Small frames are copied: a view would keep the block in use."""
        block = self._open(packing)
        sizes = [-size for size in packing.frames if size < 0]
        offsets, end = _places(sizes)
        if end > min(block.nbytes, self._max_bytes):
            raise MessageError(
                f"a shared block of {block.nbytes} bytes, of which {self._max_bytes} may be used, has no {sizes}"
            )
        return [
            block[offset : offset + size]
            if size >= SHARED_BYTES
            else memoryview(bytearray(block[offset : offset + size]))
            for offset, size in zip(offsets, sizes)
        ]

    def _open(self, packing: Packing) -> memoryview:
        ref = decode_body(packing.block, _block_decoder)
        if ref is None:
            return memoryview(b"")
        if self._reader is None:
            raise MessageError(
                "frames in shared memory came from a peer whose shared memory could not be opened when it connected; "
                "run the same version of torch_dpflow in all processes, and restart those that ran during an upgrade"
            )
        return self._reader.view(ref).data


# Imported on use: shared memory imports torch, which the node, the coordinator and the router do without.
def _arena(budget_bytes: int) -> Arena:
    from torch_dpflow.ipc.memory.arena import Arena

    return Arena(budget_bytes=budget_bytes)


def _reader(pid: int) -> ArenaReader:
    from torch_dpflow.ipc.memory.arena_reader import ArenaReader

    return ArenaReader(pid)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return (offset of each frame in a block, end of the last frame). Large frames are placed first.

    The large frames of a batch are then contiguous, so that the job makes a batch of them without a copy. Each small
    frame in the same block saves a frame on the socket.
    """
    offsets, end = [0] * len(sizes), 0
    for large in (True, False):
        for number, size in enumerate(sizes):
            if (size >= SHARED_BYTES) is large:
                offsets[number] = aligned(end)
                end = offsets[number] + size
    return offsets, end
