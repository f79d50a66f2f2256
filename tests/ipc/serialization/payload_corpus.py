"""Seeds for the fuzz test of payloads: `python -m tests.ipc.serialization.payload_corpus` writes them anew.

A seed is msgpack: the table as its own msgpack bytes, and the frames. The names of malformed ones begin
with "bad-". Heads name the functions that rebuild their objects, so renaming those takes new seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torch_dpflow.ipc.messages.headers import BlockRef, BufferSpan, PayloadTable
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, encode

FOLDER = Path(__file__).parent / "corpus"


class Seed(NamedTuple):
    table: bytes
    frames: list[bytes]


def load() -> dict[str, Seed]:
    """The committed seeds by name."""
    return {
        path.stem: msgspec.msgpack.decode(path.read_bytes(), type=Seed) for path in sorted(FOLDER.glob("*.msgpack"))
    }


def _objects() -> dict[str, Any]:
    base = torch.arange(64.0)
    return {
        "none": None,
        "text": ["text", b"bytes", 5],
        "pair": (torch.arange(12.0).view(3, 4), torch.arange(3)),
        "aliases": [base, base[8:16], base.view(8, 8).t()],
        "arrays": {"a": np.arange(5), "f": np.asfortranarray(np.eye(3)), "t": np.array(["x", "yz"])},
        "sparse": torch.eye(4).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "long-double": np.arange(3).astype(np.longdouble),
        "empty": [torch.zeros(0), np.zeros((0, 4))],
    }


def _with_a_frame_of_its_own() -> tuple[PayloadTable, list[bytes]]:
    """A payload with one coalesced buffer and one in its own frame, as if 64 bytes were big."""
    table, frames = encode((torch.arange(12.0), torch.zeros(16)))
    first = bytes(frames[0])
    small, big = table.buffers
    content = [first[: big.offset], first[big.offset : big.offset + big.size]]
    return PayloadTable(2, (), table.head, (small, BufferSpan(1, 0, big.size))), content


def _with_big_bytes() -> tuple[PayloadTable, list[bytes]]:
    """A payload with a bytes object out of band, as if 100 bytes were big."""
    table, frames = encode([bytes(LARGE_BYTES), 5])
    return PayloadTable(2, (), table.head, (BufferSpan(1, 0, 100),)), [bytes(frames[0]), bytes(range(100))]


def _malformed() -> Iterator[tuple[str, PayloadTable, list[bytes]]]:
    table, content = _with_a_frame_of_its_own()
    head, (small, own) = table.head, table.buffers
    blocks = (BlockRef(1, 3, 4032, 64, 1, 0),)
    yield "no-frames", PayloadTable(0, (), head, (small, own)), []
    yield "too-few-frames", table, content[:1]
    yield "too-many-frames", table, [*content, b""]
    yield "empty-frames", table, [b"", b""]
    yield "head-cut", table, [content[0][: head.size // 2], content[1]]
    yield "head-elsewhere", PayloadTable(2, (), BufferSpan(1, 0, 10), (small, own)), content
    yield "head-beyond", PayloadTable(2, (), BufferSpan(0, 0, 1 << 40), (small, own)), content
    yield "head-negative", PayloadTable(2, (), BufferSpan(0, 0, -1), (small, own)), content
    yield "no-buffers", PayloadTable(2, (), head, ()), content
    yield "one-buffer", PayloadTable(2, (), head, (own,)), content
    yield "short-buffer", PayloadTable(2, (), head, (BufferSpan(0, small.offset, 40), own)), content
    yield "huge-buffer", PayloadTable(2, (), head, (BufferSpan(0, small.offset, 1 << 62), own)), content
    yield "inside-head", PayloadTable(2, (), head, (BufferSpan(0, 0, 48), own)), content
    yield "unaligned", PayloadTable(2, (), head, (BufferSpan(0, small.offset + 1, 48), own)), content
    yield "part-of-a-frame", PayloadTable(2, (), head, (small, BufferSpan(1, 32, 32))), content
    yield "no-such-frame", PayloadTable(2, (), head, (small, BufferSpan(7, 0, 64))), content
    yield "no-such-block", PayloadTable(2, blocks, head, (small, BufferSpan(-2, 0, 64))), content
    yield "block-without-reader", PayloadTable(2, blocks, head, (small, BufferSpan(-1, 0, 64))), content
    yield "head-in-block", PayloadTable(2, blocks, BufferSpan(-1, 0, 64), (small, own)), content


def _write(name: str, table: PayloadTable, frames: list[bytes]) -> None:
    seed = Seed(msgspec.msgpack.encode(table), frames)
    (FOLDER / f"{name}.msgpack").write_bytes(msgspec.msgpack.encode(seed))


def main() -> None:
    """Write every seed."""
    FOLDER.mkdir(exist_ok=True)
    for name, obj in _objects().items():
        table, frames = encode(obj)
        _write(name, table, [bytes(frame) for frame in frames])
    _write("frame", *_with_a_frame_of_its_own())
    _write("bytes", *_with_big_bytes())
    for name, table, content in _malformed():
        _write(f"bad-{name}", table, content)


if __name__ == "__main__":
    main()
