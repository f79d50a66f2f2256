"""What a JPEG's markers say of its frame, read in microseconds (ITU-T T.81, annex B)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

SOI, EOI = b"\xff\xd8\xff", b"\xff\xd9"
_SOS, _DCT_FRAMES = (
    0xDA,
    (0xC0, 0xC1, 0xC2),
)  # baseline, extended sequential, progressive; all with Huffman codes
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
#: Of a segment: 0xFF, its marker, its length. Of a frame: bits, height, width, components.
_SEGMENT, _FRAME = struct.Struct(">BBH").unpack_from, struct.Struct(">BHHB").unpack_from
#: Rows and columns of a block of coefficients.
_BLOCK = 8


class JpegFrame(NamedTuple):
    """The frame of a JPEG with one or three components of eight bits."""

    height: int
    width: int
    #: Rows that are decoded together.
    mcu_height: int
    #: Where in the file the height stands.
    height_at: int
    #: How much more the colours are subsampled along one side than along the other: 4 for 4:1:1 and 4:4:1.
    unevenness: int = 1

    def rows_to_decode(self, rows: int) -> int:
        """The height that the file may state for its first `rows` to be decoded as they are in the whole.

        One row more than asked for: where colour is subsampled, a row takes part of it from the next.
        """
        return min(self.height, -(-(rows + 1) // self.mcu_height) * self.mcu_height)


def read_frame(data: bytes | bytearray | memoryview) -> JpegFrame | None:
    """The frame of a whole JPEG; None where anything is unusual, which is for Pillow to judge."""
    if bytes(data[:3]) != SOI:
        return None
    frame, at = None, 2
    try:
        prefix, marker, length = _SEGMENT(data, at)
        while marker != _SOS:
            if prefix != 0xFF or not 0xC0 <= marker <= 0xFE or marker in _OTHER_FRAMES:
                return None
            if marker in _DCT_FRAMES:
                if frame is not None:
                    return None
                frame = _frame(data, at)
            at += 2 + length
            prefix, marker, length = _SEGMENT(data, at)
        if frame is None or prefix != 0xFF or not _ends(data, at):
            return None
    except (IndexError, struct.error, ValueError):
        return None
    return frame


def _frame(data: bytes | bytearray | memoryview, at: int) -> JpegFrame:
    """Raises ValueError."""
    bits, height, width, components = _FRAME(data, at + 4)
    if bits != 8 or components not in (1, 3) or not height or not width:
        raise ValueError("neither grey nor of three colours")
    factors = [divmod(data[at + 11 + 3 * number], 16) for number in range(components)]
    vertical = [down for _, down in factors]
    return JpegFrame(height, width, _BLOCK * max(1, *vertical), at + 5, unevenness(factors))


def unevenness(factors: Sequence[tuple[int, int]]) -> int:
    """`JpegFrame.unevenness` of the components' sampling factors, across and down. Raises ValueError."""
    if not factors or not all(across > 0 and down > 0 for across, down in factors):
        raise ValueError("no sampling factors")
    ratios: list[int] = [max(side) // min(side) for side in zip(*factors)]
    return max(ratios) // min(ratios)


def _ends(data: bytes | bytearray | memoryview, start: int) -> bool:
    """Whether the image has an end: one that was cut short has none, and Pillow refuses it."""
    return (data if isinstance(data, bytes | bytearray) else bytes(data)).rfind(EOI, start) > 0
