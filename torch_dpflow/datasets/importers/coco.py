"""Imports images with COCO's detection annotations, from a file of any size."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.json_arrays import read_arrays
from torch_dpflow.errors import SourceError

#: What is kept of an image and of an annotation; the rest of COCO's fields serve other tasks.
_IMAGE_FIELDS = ("id", "file_name", "width", "height")
_ANNOTATION_FIELDS = ("id", "category_id", "bbox", "area", "iscrowd")
#: Pages that SQLite keeps in memory, KiB.
_CACHE_KIB = 32 * 1024

_TABLES = """
create table image (position integer primary key, id integer unique, meta blob);
create table annotation (position integer primary key, image integer, meta blob);
"""
_ORPHAN = "select image from annotation where image not in (select id from image) limit 1"
_IMAGES = "select id, meta from image where position >= ? order by position"
_ANNOTATIONS = "select meta from annotation where image = ? order by position"


class CocoImporter:
    """Reads COCO's `instances_*.json`: one sample for each image, in the file's order.

    Annotations: `image_id`, `file_name`, `width`, `height` and `annotations`, a list of COCO's own records.
    `info` has `categories`. The file may be larger than memory and have its arrays in any order: it is read
    once, as a stream, into a temporary SQLite file that joins images with their annotations and takes about
    as much room as what is kept of it.

    Args:
        annotations: the file; a path or a URL.
        images: the directory that `file_name` is relative to.
        segmentation: keep the outlines of objects too, which are most of the file.
        options: what fsspec needs to open both.
    """

    def __init__(
        self,
        annotations: str,
        *,
        images: str,
        segmentation: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = dict(options or {})
        folder, _, self._name = str(annotations).rstrip("/").rpartition("/")
        self._files = Files(folder or ".", self.options)
        self._kept = (*_ANNOTATION_FIELDS, "segmentation") if segmentation else _ANNOTATION_FIELDS
        self._categories: list[Any] = []
        self._total: int | None = None
        self.root: str | None = Files(images, self.options).url
        self.source = {
            "importer": "coco",
            "annotations": f"{self._files.url}/{self._name}",
            "root": self.root,
            "segmentation": segmentation,
        }

    def extend(self, info: Mapping[str, Any]) -> None:
        """Samples of this kind do not depend on those before them."""

    def items(self, start: int = 0) -> Iterator[Item]:
        with self._joined() as database:
            for image, encoded in database.execute(_IMAGES, (start,)):
                meta = msgspec.json.decode(encoded, type=dict[str, Any])
                found = database.execute(_ANNOTATIONS, (image,))
                meta["annotations"] = [msgspec.Raw(record) for (record,) in found]
                yield Item(path=meta["file_name"], meta=meta)

    def total(self) -> int | None:
        return self._total

    def info(self) -> Mapping[str, Any]:
        return {"categories": self._categories}

    @contextmanager
    def _joined(self) -> Iterator[sqlite3.Connection]:
        """The file as tables."""
        with (
            tempfile.TemporaryDirectory(prefix="dpflow-coco-") as folder,
            closing(sqlite3.connect(Path(folder) / "coco.sqlite")) as database,
        ):
            for setting in ("journal_mode = off", "synchronous = off", f"cache_size = -{_CACHE_KIB}"):
                database.execute(f"pragma {setting}")
            database.executescript(_TABLES)
            self._fill(database)
            database.execute("create index annotation_image on annotation (image)")
            orphan = database.execute(_ORPHAN).fetchone()
            if orphan is not None:
                raise self._malformed(f"there are annotations of image {orphan[0]}, which it does not list")
            self._total = database.execute("select count(*) from image").fetchone()[0]
            yield database

    def _fill(self, database: sqlite3.Connection) -> None:
        self._categories = []
        positions = {"images": 0, "annotations": 0}
        for array, record in self._records():
            if array == "categories":
                self._categories.append(record)
                continue
            self._insert(database, array, record, positions[array])
            positions[array] += 1

    def _insert(self, database: sqlite3.Connection, array: str, record: Any, position: int) -> None:
        try:
            if array == "images":
                meta = {field: record[field] for field in _IMAGE_FIELDS if field in record}
                row = (position, meta.pop("id"), msgspec.json.encode({"image_id": record["id"], **meta}))
                record["file_name"]
                database.execute("insert into image values (?, ?, ?)", row)
            else:
                meta = {field: record[field] for field in self._kept if field in record}
                row = (position, record["image_id"], msgspec.json.encode(meta))
                database.execute("insert into annotation values (?, ?, ?)", row)
        except (KeyError, TypeError) as error:
            raise self._malformed(f"number {position} of {array!r} has no {error}") from error
        except sqlite3.IntegrityError as error:
            raise self._malformed(f"it lists image {record['id']} twice") from error

    def _records(self) -> Iterator[tuple[str, Any]]:
        try:
            with self._files.open(self._name) as file:
                yield from read_arrays(file, ("images", "annotations", "categories"))
        except FileNotFoundError as error:
            raise SourceError(f"there is no {self.source['annotations']}") from error
        except ValueError as error:
            raise self._malformed(str(error)) from error

    def _malformed(self, how: str) -> SourceError:
        return SourceError(f"{self.source['annotations']} is no file of COCO annotations: {how}")
