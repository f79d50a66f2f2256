"""Tar shards as tests write them, and the samples in them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

Members = Sequence[tuple[str, bytes]]


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write an archive of regular files."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def samples_of(first: int, count: int, seed: int = 0) -> list[dict[str, bytes | str]]:
    """Return samples with an image, a label, a text and a mask, each of random bytes."""
    chance = random.Random(seed * 1_000_003 + first)
    return [
        {
            "__key__": f"part/{number:06d}",
            "jpg": chance.randbytes(chance.randrange(1, 3000)),
            "cls": str(number % 10).encode(),
            "caption.txt": f"sample {number} é".encode(),
            "mask.png": chance.randbytes(300),
        }
        for number in range(first, first + count)
    ]


def members_of(samples: Iterable[dict[str, bytes | str]]) -> list[tuple[str, bytes]]:
    """Return the members of a shard with these samples."""
    return [
        (f"{sample['__key__']}.{ending}", content)
        for sample in samples
        for ending, content in sample.items()
        if isinstance(content, bytes)
    ]


def write_shards(folder: Path, shards: int, each: int, seed: int = 0) -> list[dict[str, bytes | str]]:
    """Write `train-000.tar` and so on; return all samples."""
    folder.mkdir(exist_ok=True)
    found = []
    for number in range(shards):
        samples = samples_of(number * each, each, seed)
        write_tar(folder / f"train-{number:03d}.tar", members_of(samples))
        found += samples
    return found
