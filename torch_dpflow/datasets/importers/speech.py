"""Imports folders of utterances with their transcripts, in the layout of LibriSpeech."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch_dpflow.datasets.files import DirectoryEntry, Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.tree import check_folder, endings_of
from torch_dpflow.errors import SourceError

AUDIO_ENDINGS = (".flac", ".wav", ".mp3", ".ogg", ".opus")
_TRANSCRIPT = ".trans.txt"


class SpeechImporter:
    """Reads `<root>/<speaker>/<chapter>/<utterance>.flac` and the chapter's `*.trans.txt`, sorted by name.

    A line of a transcript is an utterance's name, a space and its words, in UTF-8, with or without a byte-order mark.
    Annotations: `utterance`, `speaker`, `chapter` and `text`. One chapter is in memory at a time.

    Args:
        root: the directory of the speakers; a path or a URL.
        endings: the endings of audio files, in any case; other files are ignored.
        options: fsspec's options for `root`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        endings: Sequence[str] = AUDIO_ENDINGS,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._files = Files(root, options)
        self.options = self._files.options
        self._endings = endings_of(endings)
        self.root: str | None = self._files.url
        self.source = {"importer": "speech", "root": self.root, "endings": list(self._endings)}

    def extend(self, info: Mapping[str, Any]) -> None:
        """Samples of this kind do not depend on those before them."""

    def items(self, start: int = 0) -> Iterator[Item]:
        return islice(self._all_items(), start, None)

    def total(self) -> int | None:
        return None

    def info(self) -> Mapping[str, Any]:
        return {}

    def _all_items(self) -> Iterator[Item]:
        check_folder(self._files)
        for speaker in self._files.children(all_keys=True):
            if speaker.is_directory:
                for chapter in self._files.children(speaker.name, all_keys=True):
                    if chapter.is_directory:
                        yield from self._chapter(speaker.name, chapter.name)

    def _chapter(self, speaker: str, chapter: str) -> Iterator[Item]:
        folder = f"{speaker}/{chapter}"
        children = self._files.children(folder, all_keys=True)
        words = self._transcripts(folder, children)
        for child in children:
            stem, dot, ending = self._files.label(child.name).rpartition(".")
            if (dot + ending).lower() not in self._endings:
                continue
            if stem not in words:
                raise SourceError(
                    f"{self.root}/{folder}/{child.name} has no line in a *{_TRANSCRIPT} beside it"
                )
            meta = {
                "utterance": stem,
                "speaker": self._files.label(speaker),
                "chapter": self._files.label(chapter),
                "text": words.pop(stem),
            }
            yield Item(path=f"{folder}/{child.name}", length=child.size, meta=meta, revision=child.revision)
        if words:
            raise SourceError(
                f"{self.root}/{folder} has transcripts of audio that is missing: {sorted(words)}"
            )

    def _transcripts(self, folder: str, children: list[DirectoryEntry]) -> dict[str, str]:
        words: dict[str, str] = {}
        for child in children:
            if not child.name.endswith(_TRANSCRIPT):
                continue
            path = f"{folder}/{child.name}"
            # Not splitlines(), which also splits at U+2028 and others that a transcript may have.
            for number, line in enumerate(re.split(r"\r\n|\n|\r", self._text(path)), 1):
                name, _, text = line.strip(" \t").partition(" ")
                if name in words:
                    raise SourceError(f"{self.root}/{path}, line {number}: {name} has two transcripts")
                if name:
                    words[name] = text
        return words

    def _text(self, path: str) -> str:
        try:
            return self._files.read(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.root}/{path} is no UTF-8 text: {error}") from error
