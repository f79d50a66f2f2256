"""Imports trees of images, one directory a class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.tree import FoundFile, check_folder, check_links, endings_of, files_below
from torch_dpflow.errors import SourceError

#: The endings that torchvision's ImageFolder takes for images.
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolderImporter:
    """Reads `<root>/<class>/**/<image>`, in the order and with the labels of torchvision's.

    Annotations: `label` (number of the class) and `class` (its name). `info` has `classes`, by label.
    The listing of one class is in memory at a time.

    Args:
        root: the directory that holds the classes; a path or a URL.
        endings: the endings of images, in any case; other files are ignored.
        classes: names of the first labels, in order; other classes get the next labels. None:
            the directories' names, sorted.
        options: fsspec's options for `root`.
    """

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
        """See `Importer`."""
        return {
            "importer": "imagefolder",
            "root": self.root,
            "endings": list(self._endings),
            "classes": self._known,
        }

    def extend(self, info: Mapping[str, Any]) -> None:
        """The classes of `info` keep their labels."""
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
                    yield Item(path=image.path, length=image.size, meta=meta, revision=image.revision)
            position += len(found)

    def total(self) -> int | None:
        return None

    def info(self) -> Mapping[str, Any]:
        return {"classes": list(self._labels)}

    def _find_classes(self) -> dict[str, str]:
        """The directory of each class that is present, in the order of their names."""
        folders = [child.name for child in self._files.children(all_keys=True) if child.is_directory]
        present = dict(sorted((self._files.label(folder), folder) for folder in folders))
        if len(present) < len(folders):
            raise SourceError(f"{self.root} lists a directory in two spellings; correct the server's listing")
        if not present:
            check_folder(self._files)
            raise SourceError(f"{self.root} has no directories; an ImageFolder tree has one for each class")
        names = [*self._known, *(name for name in present if name not in self._known)]
        self._labels = {name: label for label, name in enumerate(names)}
        return present

    def _images(self, name: str) -> list[FoundFile]:
        found = [file for file in files_below(self._files, name) if file.path.lower().endswith(self._endings)]
        if not found:
            raise SourceError(
                f"{self.root}/{name} holds no image; a class needs at least one file that ends with one of "
                f"{', '.join(self._endings)}"
            )
        check_links(self._files, found)
        return found
