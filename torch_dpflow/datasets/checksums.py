"""Checksums of samples, written as `algorithm:hexadecimal digest`."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Literal, get_args

ChecksumAlgorithm = Literal["crc32", "sha256"]

CHECKSUM_PATTERN = "^(crc32:[0-9a-f]{8}|sha256:[0-9a-f]{64})$"


def sha256_of(data: bytes | memoryview) -> str:
    """The SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _crc32_of(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


_ALGORITHMS: dict[str, Callable[[bytes | memoryview], str]] = {"crc32": _crc32_of, "sha256": sha256_of}
assert _ALGORITHMS.keys() == set(get_args(ChecksumAlgorithm))


def checksum_of(data: bytes | memoryview, algorithm: ChecksumAlgorithm) -> str:
    """The checksum of a sample's bytes: "crc32" detects accidents cheaply, "sha256" forgeries too."""
    return f"{algorithm}:{_ALGORITHMS[algorithm](data)}"


def matches(data: bytes | memoryview, checksum: str) -> bool:
    """Whether the bytes have this checksum, which names its algorithm."""
    algorithm, _, digest = checksum.partition(":")
    return _ALGORITHMS[algorithm](data) == digest
