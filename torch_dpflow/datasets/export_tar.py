"""Tar shards of an export, as webdataset reads them."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_dpflow.errors import SourceError

#: An ending that `main` may name.
ENDING = r"[a-z0-9][a-z0-9._-]{0,63}"
#: Endings of paths that are kept; longer ones are parts of names.
_OF_PATHS = re.compile(r"[a-z0-9]{1,5}")
#: Members as webdataset finds them: no line breaks, and no dot in the last part of the key.
_MEMBER = re.compile(r"((?:.*/|)[^./\n\0]+)[.]([^/\n\0]+)")
_HIDDEN = re.compile(r"__[^/]*__($|/)")
_ANNOTATIONS = "json"
_SIGNATURES = (
    (re.compile(rb"\xff\xd8\xff"), "jpg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
    (re.compile(rb"II\*\0|MM\0\*"), "tif"),
    (re.compile(rb"RIFF....WAVE", re.DOTALL), "wav"),
    (re.compile(rb"fLaC"), "flac"),
    (re.compile(rb"\x93NUMPY"), "npy"),
)
IMAGES = frozenset({"jpg", "png", "gif", "webp", "tif"})


class ExportSample(NamedTuple):
    """A sample to write."""

    number: int
    #: Its bytes come first. By ending, if it came from WebDataset; else one with the ending of its path, "" if unknown.
    members: dict[str, bytes]
    #: The key in WebDataset; None if it came from elsewhere.
    key: str | None
    #: The annotations as a JSON object; those from WebDataset are members.
    annotations: bytes
    path: str

    @property
    def data(self) -> bytes:
        """The sample's bytes."""
        return next(iter(self.members.values()))


def ending_of(data: bytes) -> str | None:
    """Return the ending of files that begin like these bytes; None if it is unknown."""
    return next((ending for pattern, ending in _SIGNATURES if pattern.match(data)), None)


def main_ending(sample: ExportSample) -> str:
    """Return the ending of a sample's bytes: that of its path, or one found by the first bytes, else "bin"."""
    ending = next(iter(sample.members))
    if sample.key is None and not _OF_PATHS.fullmatch(ending):
        return ending_of(sample.data) or "bin"
    return ending


class TarFiles:
    """Makes tar shards. Headers have no time and no owner, so that shards of every run are equal."""

    def __init__(self, main: str | None) -> None:
        self._main = main

    def observe(self, number: int, fields: Mapping[str, Any]) -> None:
        """Do nothing: all annotations are JSON."""

    def begin(self, first: ExportSample) -> None:
        """Do nothing: each sample has its own members."""

    def difference(self) -> str:
        return ""

    def name(self, variant: str, number: int, count: int) -> str:
        return f"{variant}-{number:06d}.tar"

    def content(self, samples: Iterator[ExportSample]) -> bytes:
        shard = bytearray()
        for sample in samples:
            key = f"{sample.number:09d}" if sample.key is None else sample.key
            for ending, data in self._members(sample).items():
                _check_name(sample, key, ending)
                header = tarfile.TarInfo(f"{key}.{ending}")  # mode 0644, time 0
                header.size = len(data)
                shard += header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
                shard += data
                shard += bytes(-len(data) % tarfile.BLOCKSIZE)
        shard += bytes(2 * tarfile.BLOCKSIZE)
        shard += bytes(-len(shard) % tarfile.RECORDSIZE)
        return bytes(shard)

    def _members(self, sample: ExportSample) -> dict[str, bytes]:
        ending = self._main or main_ending(sample)
        _, *rest = sample.members.items()
        if sample.key is None:
            rest = [(_ANNOTATIONS, sample.annotations)]
        members = {ending: sample.data, **dict(rest)}
        if len(members) <= len(rest):
            raise SourceError(
                f"sample {sample.number} ({sample.path}) has two members {ending!r}; name the one with its bytes: "
                "main='bin' (--main bin)"
            )
        return members


def _check_name(sample: ExportSample, key: str, ending: str) -> None:
    """Raise SourceError for a member that webdataset would leave out, or give to another sample."""
    name = f"{key}.{ending}"
    match = _MEMBER.fullmatch(name)
    if match is None or match.groups() != (key, ending) or _HIDDEN.match(name):
        raise SourceError(
            f"sample {sample.number} ({sample.path}) has the member {name!r}, which webdataset cannot read; a key has "
            "no line break, and no dot in its last part"
        )
