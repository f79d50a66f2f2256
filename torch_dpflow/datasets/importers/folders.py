"""Importers of directory trees: images by class, and speech in the layout of LibriSpeech."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch_dpflow.datasets.files import DirectoryEntry, Files
from torch_dpflow.datasets.importers.base import BaseImporter, Item
from torch_dpflow.datasets.importers.sources import SourceFiles
from torch_dpflow.datasets.importers.splits import splits_among
from torch_dpflow.datasets.storage.urls import printable_url
from torch_dpflow.errors import OptionError, SourceError


def check_folder(files: Files) -> None:
    """Raise SourceError if the directory `files` does not exist. On object stores, empty directories do not exist."""
    if not files.exists(""):
        raise SourceError(
            f"there is no folder {printable_url(files.url)}; check the source's path, and on object stores the right "
            "to list it"
        )


def files_below(files: Files, folder: str) -> list[DirectoryEntry]:
    """Return all files below `folder`, hidden files too, sorted by directory and then by name, as torchvision does.

    The entries' names are paths below `files`. Links to directories are followed, except to a directory that contains
    the link.
    """
    found: list[tuple[str, DirectoryEntry]] = []
    pending = [(folder, frozenset({files.real(folder)}))]
    while pending:
        directory, above = pending.pop()
        for child in files.children(directory, all_keys=True, hidden=True):
            path = f"{directory}/{child.name}" if directory else child.name
            if not child.is_directory:
                found.append((directory, child._replace(name=path)))
            elif (real := files.real(path)) not in above:
                pending.append((path, above | {real}))
    found.sort(key=lambda one: (files.label(one[0]), files.label(one[1].name)))
    return [file for _, file in found]


def check_links(files: Files, found: Iterable[DirectoryEntry]) -> None:
    """Raise SourceError for an entry that is a broken link, and StorageError for a pipe, socket or device."""
    for file in found:
        if not file.size:
            files.check_regular(file.name)
        if not file.size and not files.exists(file.name):
            raise SourceError(
                f"{printable_url(files.url)}/{file.name} is a link that leads nowhere; restore the file that it names, "
                "or remove it"
            )


def _identity(file: DirectoryEntry) -> bytes:
    """Return bytes that change with the file's path, size or state."""
    return f"{file.name}\0{file.size}\0{file.state}\0".encode(errors="surrogatepass")


def endings_of(endings: Sequence[str]) -> tuple[str, ...]:
    """Return file extensions in lower case, each with a dot. Raises OptionError for an empty one, or for none."""
    found = tuple(f".{ending.strip().lower().removeprefix('.')}" for ending in endings)
    if not found or "." in found:
        raise OptionError(f"endings={endings!r}: give endings such as .jpg,.png")
    return found


#: The extensions of images for torchvision's ImageFolder.
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolderImporter(BaseImporter):
    """Importer of `<root>/<class>/**/<image>`, in the order and with the labels of torchvision's ImageFolder.

    As in torchvision, directories and files whose names begin with a dot are classes and images too. Annotations:
    `label` (number of the class) and `class` (its name). `info` has `classes`, by label. The listing of one class is in
    memory at a time.

    Args:
        root: the directory that holds the classes; a path or a URL.
        endings: file extensions of images, upper or lower case; other files are ignored.
        classes: names of the first labels, in order; other classes get the next labels. None: the sorted names of the
            directories.
        options: fsspec's options for `root`.
    """

    name = "imagefolder"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        endings: Sequence[str] = IMAGE_ENDINGS,
        classes: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._files = Files(root, options)
        self.options = self._files.options
        self._endings = endings_of(endings)
        self._known = list(classes or [])
        self._labels: dict[str, int] = {}
        self.root: str | None = self._files.url

    @property
    def source(self) -> Mapping[str, Any]:
        return {"importer": self.name, "root": self.root, **self.settings()}

    def settings(self) -> Mapping[str, Any]:
        return {"endings": list(self._endings), "classes": self._known}

    def scanned(self, numbers: Iterable[int]) -> Generator[tuple[int, Iterator[Item]]]:
        """Yield (0, all images) for number 0. The whole tree counts as one object, see `ShardImporter.scanned`."""
        for number in numbers:
            yield number, self.items()

    @staticmethod
    def size_of(number: int) -> None:
        """Return None. Reads compare the size of each image, so they need no size of the tree, which is object 0."""

    @staticmethod
    def finds(files: SourceFiles) -> bool:
        """Return whether the first subdirectory of a directory directly contains an image."""
        if not files.folders:
            return False
        children = Files(files.given, files.options).children(files.folders[0])
        return any(child.name.lower().endswith(IMAGE_ENDINGS) for child in children)

    def objects(self) -> list[tuple[str | None]]:
        """Return [(digest,)], a digest of the images' names, sizes and states; [(None,)] if an image has no state."""
        digest = hashlib.sha256()
        has_states = True
        for folder in self._find_classes().values():
            for image in self._images(folder):
                has_states &= image.state is not None
                digest.update(_identity(image))
        return [(digest.hexdigest() if has_states else None,)]

    def extend(self, info: Mapping[str, Any]) -> None:
        """Keep the labels of the classes in `info`; other classes get the next labels."""
        known = info.get("classes", [])
        self._known = [*known, *(name for name in self._known if name not in known)]

    def items(self, start: int = 0) -> Iterator[Item]:
        present = self._find_classes()
        position = 0
        for name, folder in present.items():
            found = self._images(folder)
            if position + len(found) > start:
                for image in found[max(0, start - position) :]:
                    meta = {"label": self._labels[name], "class": name}
                    yield Item(path=image.name, length=image.size, meta=meta, revision=image.state)
            position += len(found)

    def info(self) -> Mapping[str, Any]:
        return {"classes": list(self._labels)}

    def _find_classes(self) -> dict[str, str]:
        """Return the directory of each class that is present, in the order of their names."""
        children = self._files.children(all_keys=True, hidden=True)
        folders = [child.name for child in children if child.is_directory]
        present = dict(sorted((self._files.label(folder), folder) for folder in folders))
        if len(present) < len(folders):
            raise SourceError(f"{self.root} lists a directory in two spellings; correct the server's listing")
        if not present:
            check_folder(self._files)
            raise SourceError(f"{self.root} has no directories; an ImageFolder tree has one for each class")
        splits = [] if self._known else splits_among(present)
        if splits:
            raise SourceError(
                f"{self.root} has the directories {splits}, which are splits and not classes; give one of them, "
                "or name them as classes="
            )
        names = [*self._known, *(name for name in present if name not in self._known)]
        self._labels = {name: label for label, name in enumerate(names)}
        return present

    def _images(self, name: str) -> list[DirectoryEntry]:
        found = [file for file in files_below(self._files, name) if file.name.lower().endswith(self._endings)]
        if not found:
            raise SourceError(
                f"{self.root}/{name} holds no image; a class needs at least one file that ends with one of "
                f"{', '.join(self._endings)}; remove it if it is no class"
            )
        check_links(self._files, found)
        return found


AUDIO_ENDINGS = (".flac", ".wav", ".mp3", ".ogg", ".opus")
_TRANSCRIPT = ".trans.txt"


class SpeechImporter(BaseImporter):
    """Importer of `<root>/<speaker>/<chapter>/<utterance>.flac` and the chapter's `*.trans.txt`, sorted by name.

    A line of a transcript is an utterance's name, a space and its words, in UTF-8, with or without a byte-order mark.
    Annotations: `utterance`, `speaker`, `chapter` and `text`. Directories and files whose names begin with a dot are
    ignored. One chapter is in memory at a time.

    Args:
        root: the directory of the speakers; a path or a URL.
        endings: file extensions of audio, upper or lower case; other files are ignored.
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

    @functools.cached_property
    def source(self) -> Mapping[str, Any]:
        """See `Importer.source`. The value of `state` changes with the size or state of any transcript."""
        digest = hashlib.sha256()
        for speaker, chapter, children in self._chapters() if self._files.exists("") else ():
            for child in children:
                if child.name.endswith(_TRANSCRIPT):
                    digest.update(_identity(child._replace(name=f"{speaker}/{chapter}/{child.name}")))
        settings = {"root": self.root, "endings": list(self._endings)}
        return {"importer": "speech", **settings, "state": digest.hexdigest()}

    def items(self, start: int = 0) -> Iterator[Item]:
        return islice(self._all_items(), start, None)

    def _all_items(self) -> Iterator[Item]:
        check_folder(self._files)
        for chapter in self._chapters():
            yield from self._items_of(*chapter)

    def _chapters(self) -> Iterator[tuple[str, str, list[DirectoryEntry]]]:
        """Yield the names of each speaker and chapter, and the chapter's entries."""
        for speaker in self._files.children(all_keys=True):
            if speaker.is_directory:
                for chapter in self._files.children(speaker.name, all_keys=True):
                    if chapter.is_directory:
                        folder = f"{speaker.name}/{chapter.name}"
                        yield speaker.name, chapter.name, self._files.children(folder, all_keys=True)

    def _items_of(self, speaker: str, chapter: str, children: list[DirectoryEntry]) -> Iterator[Item]:
        folder = f"{speaker}/{chapter}"
        words = self._transcripts(folder, children)
        for child in children:
            stem, dot, ending = self._files.label(child.name).rpartition(".")
            if (dot + ending).lower() not in self._endings:
                continue
            if stem not in words:
                raise SourceError(f"{self.root}/{folder}/{child.name} has no line in a *{_TRANSCRIPT} next to it")
            meta = {
                "utterance": stem,
                "speaker": self._files.label(speaker),
                "chapter": self._files.label(chapter),
                "text": words.pop(stem),
            }
            yield Item(path=f"{folder}/{child.name}", length=child.size, meta=meta, revision=child.state)
        if words:
            raise SourceError(f"{self.root}/{folder} has transcripts of audio that is missing: {sorted(words)}")

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
