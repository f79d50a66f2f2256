"""Packs: objects in which samples without a file of their own are concatenated."""

from __future__ import annotations

import re

from torch_dpflow.datasets.files import Files

#: Most bytes of a pack, unless a single sample is larger; an import keeps them in memory.
PACK_BYTES = 64 * 2**20
_NAME = re.compile(r"pack-\d+-\d+\.bin")


class ShardPacks:
    """The packs of one metadata shard: `<folder>/pack-<shard>-<k>.bin`. Each is written once, whole.

    Args:
        files: the dataset's directory.
        folder: the folder of the packs, relative to it.
    """

    def __init__(self, files: Files, folder: str, shard: int) -> None:
        self._files = files
        self._folder = folder
        self._shard = shard
        self._packs = 0
        #: in the pending pack
        self._samples = 0
        self._pending = bytearray()

    def add(self, data: bytes) -> tuple[str, int]:
        """Append a sample's bytes; returns the pack's name and their offset in it."""
        if self._pending and len(self._pending) + len(data) > PACK_BYTES:
            self.flush()
        place = (self._name(), len(self._pending))
        self._pending += data
        self._samples += 1
        return place

    def flush(self) -> None:
        """Write the pending pack, whose samples cannot be read before."""
        if self._samples:
            self._files.ensure(f"{self._folder}/{self._name()}", bytes(self._pending))
            self._packs += 1
            self._samples = 0
            self._pending.clear()

    def _name(self) -> str:
        return f"pack-{self._shard}-{self._packs}.bin"


def is_pack(path: str) -> bool:
    """Whether a path or URL has the name of a pack."""
    return _NAME.fullmatch(path.rpartition("/")[2]) is not None


def packs_of(files: Files, folder: str) -> list[str]:
    """The paths of the packs in a folder; other files in it were not written by an import."""
    return [f"{folder}/{child.name}" for child in files.children(folder) if is_pack(child.name)]
