"""Snappy for frames between hosts, where a probe of the content shows that it pays.

On one host it never pays: a memcpy is faster than any compressor. Between hosts it pays for text, labels, masks and
small integers, and not for JPEGs, noise or float images, so parts of each frame are compressed on trial first.
"""

from __future__ import annotations

from collections.abc import Sequence

import snappy

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.payload_table import Frame

#: Shorter frames are not compressed, bytes: they fit into a few packets anyhow.
SMALLEST_FRAME = 4 * 1024
#: The trial takes this many parts of this many bytes, spread evenly over the frame.
PROBES, PROBE_BYTES = 3, 4 * 1024
#: A frame is compressed where the trial shrinks to this share or less.
WORTHWHILE = 0.8
#: Snappy's best case: 3 bytes stand for 64. A frame that claims a better ratio is not snappy data.
_MOST_EXPANSION = 22


def pays(frame: Frame) -> bool:
    """Whether parts of `frame` shrink enough to compress all of it."""
    size = memoryview(frame).nbytes
    if size < SMALLEST_FRAME:
        return False
    view = memoryview(frame).cast("B")
    step = (size - PROBE_BYTES) // (PROBES - 1)
    starts = sorted({position * step for position in range(PROBES)})
    sample = b"".join(view[start : start + PROBE_BYTES] for start in starts)
    return len(snappy.compress(sample)) <= WORTHWHILE * len(sample)


def compress(frames: Sequence[Frame]) -> tuple[list[Frame], list[int]]:
    """The frames, compressed where it pays; and for each its size before compression, bytes, or 0 without it.

    The sizes are an empty list where no frame was compressed.
    """
    packed: list[Frame] = []
    sizes: list[int] = []
    for frame in frames:
        worthwhile = pays(frame)
        packed.append(snappy.compress(frame) if worthwhile else frame)
        sizes.append(memoryview(frame).nbytes if worthwhile else 0)
    return packed, sizes if any(sizes) else []


def decompress(frame: memoryview, size: int, *, limit: int) -> memoryview:
    """The content of a frame that was `size` bytes before compression, writable.

    Raises MessageError where the frame is not snappy data; and, before anything is allocated, where the length that it
    claims differs from `size`, exceeds `limit`, or is impossible.
    """
    claim = _claimed_size(frame)
    if claim != size or claim > limit or claim > _MOST_EXPANSION * frame.nbytes:
        raise MessageError(
            f"a compressed frame of {frame.nbytes} bytes claims to hold {claim}: the header says {size}, "
            f"at most {limit} are allowed"
        )
    try:
        return memoryview(bytearray(snappy.uncompress(frame)))
    except snappy.UncompressError as error:
        raise MessageError(f"a compressed frame of {frame.nbytes} bytes is no snappy data") from error


def _claimed_size(frame: memoryview) -> int:
    """The length that snappy data begins with: 7 bits a byte, lowest first, at most 32 bits."""
    claim = 0
    for position, byte in enumerate(frame[:5]):
        claim |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return claim
    raise MessageError(f"a compressed frame of {frame.nbytes} bytes does not begin with a length")
