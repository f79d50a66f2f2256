"""CRC-32C, the checksum of TFRecord files, at the speed of compiled code and without a package for it."""

from __future__ import annotations

import cramjam

#: Bytes of a chunk of framed snappy: each has the CRC-32C of its bytes before compression.
_CHUNK = 1 << 16
#: Where the first chunk's checksum is: after the stream's identifier (10 bytes), the kind and the length (4).
_AT = 14
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C, rotated and offset as TFRecord and framed snappy store it."""
    if 0 < len(data) <= _CHUNK:
        return _first(data)
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, which follows bytes whose CRC-32C is `crc`."""
    for first in range(0, len(data), _CHUNK):
        chunk = data[first : first + _CHUNK]
        rotated = (_first(chunk) - _MASK) & 0xFFFFFFFF
        crc = _followed_by(crc, len(chunk)) ^ (((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF)
    return crc


def _first(chunk: bytes) -> int:
    """Return the masked checksum of at most 64 KiB, which framed snappy computes on its way."""
    return int.from_bytes(bytes(memoryview(cramjam.snappy.compress(chunk))[_AT : _AT + 4]), "little")


def _followed_by(crc: int, count: int) -> int:
    """Return the CRC-32C of the same bytes and `count` zero bytes, but for what the initial value contributes."""
    power = 0
    while count and crc:
        if count & 1:
            crc = _times(_ZEROS[power], crc)
        count >>= 1
        power += 1
    return crc


def _times(matrix: list[int], vector: int) -> int:
    """Multiply over the field of two elements."""
    product = 0
    for row in matrix:
        if vector & 1:
            product ^= row
        vector >>= 1
        if not vector:
            break
    return product


def _zeros() -> list[list[int]]:
    """Return the effect of 1, 2, 4 … 65536 zero bytes on a CRC, as matrices of 32 bits."""
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # of one zero bit
    found = []
    for power in range(3 + _CHUNK.bit_length()):
        if power >= 3:
            found.append(matrix)
        matrix = [_times(matrix, row) for row in matrix]
    return found


_ZEROS = _zeros()
