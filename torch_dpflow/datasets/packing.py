"""Packs: samples that have no file of their own, put one behind the other into larger objects."""

from __future__ import annotations

import re

from torch_dpflow.datasets.files import Files

#: Bytes that a pack holds at most, unless a single sample is larger: what an import keeps in memory.
PACK_BYTES = 64 * 2**20
_NAME = re.compile(r"pack-\d+-\d+\.bin")


class ShardPacks:
    """The packs of one metadata shard: `<folder>/pack-<shard>-<k>.bin`. Each is written once, whole.

    Args:
        files: the dataset's directory.
        folder: where the packs go, relative to it.
    """

    def __init__(self, files: Files, folder: str, shard: int) -> None:
        self._files = files
        self._folder = folder
        self._shard = shard
        self._packs = 0
        #: in the pack that is pending
        self._samples = 0
        self._pending = bytearray()

    def add(self, data: bytes) -> tuple[str, int]:
        """Put a sample's bytes behind the last; returns the pack's name and their offset in it."""
        if self._pending and len(self._pending) + len(data) > PACK_BYTES:
            self.flush()
        place = (self._name(), len(self._pending))
        self._pending += data
        self._samples += 1
        return place

    def flush(self) -> None:
        """Write what is pending. Before that, no sample of it can be read."""
        if self._samples:
            self._files.ensure(f"{self._folder}/{self._name()}", bytes(self._pending))
            self._packs += 1
            self._samples = 0
            self._pending.clear()

    def _name(self) -> str:
        return f"pack-{self._shard}-{self._packs}.bin"


def is_pack(path: str) -> bool:
    """Whether a path or URL is named as packs are."""
    return _NAME.fullmatch(path.rpartition("/")[2]) is not None


def packs_of(files: Files, folder: str) -> list[str]:
    """The paths of the packs in a folder; other files in it are not ours."""
    return [f"{folder}/{child.name}" for child in files.children(folder) if is_pack(child.name)]
