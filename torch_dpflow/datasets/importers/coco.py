"""Importer of images with COCO's detection annotations, from a file of any size."""

from __future__ import annotations

import codecs
import json
import os
import re
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import IO, Any

import msgspec

from torch_dpflow._core.checks import check_type, is_too_deep, may_be_too_deep
from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.folders import check_folder
from torch_dpflow.datasets.storage.urls import join_url, split_name
from torch_dpflow.errors import SourceError

#: Bytes that are read at a time.
_BLOCK = 2**18
#: Maximum characters of an element, so that malformed JSON cannot fill the memory.
_MAX_ELEMENT = 2**26
#: A number at the end of the text in memory may continue after it: 0 may begin 0.5, and 1 may begin 1e+5.
_NUMBER_TAIL = len("e+")

_SPACE = re.compile(r"[ \t\n\r]*")


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no JSON; write null or leave it out")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r:.80} twice; give each name once")
    return found


_SCANNER = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_object)


def read_arrays(file: IO[bytes], names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, element) for the arrays `names` in the object of a JSON file, in the file's order.

    The file is read once; one block of it and one element are in memory. Other JSON parsers build a document as a
    whole, or build elements in Python from events. Here `json`'s C scanner decodes one element after the other, which
    is as fast as decoding the whole (240 MB of COCO: 12 s, with ijson 67 s).

    Raises:
        ValueError: the file is no JSON object, has a name twice in one object, or ends in its middle.
    """
    text = _Text(file)
    text.expect("{")
    if text.skip_if("}"):
        return text.expect("")
    passed: set[str] = set()
    while True:
        name = text.name()
        if name in passed:
            raise ValueError(f"it has {name!r:.80} twice; give each name once")
        passed.add(name)
        text.expect(":")
        if text.skip_if("["):
            for element in _elements(text):
                if name in names:
                    yield name, element
        else:
            text.value()
        if not text.skip_if(","):
            break
    text.expect("}")
    text.expect("")


def _elements(text: _Text) -> Iterator[Any]:
    """Yield the elements of an array after its opening bracket."""
    if text.skip_if("]"):
        return
    yield text.value()
    while text.skip_if(","):
        yield text.value()
    text.expect("]")


class _Text:
    """A part of the text of a file, with the reader's position."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()  # some tools write a byte-order mark
        self._text = ""
        self._at = 0
        #: characters before it
        self._passed = 0
        self._ended = False

    def skip_if(self, character: str) -> bool:
        """Skip `character` if it is next. Returns whether it was."""
        if self._next() != character:
            return False
        self._at += 1
        return True

    def expect(self, character: str) -> None:
        """Skip `character` ("": the end of the file). Raises ValueError if it is not next."""
        if not self.skip_if(character):
            raise self._malformed(f"expected {repr(character) if character else 'its end'}", self._at)

    def name(self) -> str:
        """Return the next value, a name. Raises ValueError if it is no string."""
        if self._next() != '"':
            raise self._malformed("expected a name in quotes", self._at)
        return str(self.value())

    def value(self) -> Any:
        """Return the next value."""
        self._next()
        while True:
            try:
                value, end = _SCANNER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > _MAX_ELEMENT:
                    raise self._malformed(error.msg, error.pos) from None
            except RecursionError:
                raise self._malformed("a value is nested too deeply", self._at) from None
            else:
                if may_be_too_deep(self._text[self._at : end]) and is_too_deep(value):
                    raise self._malformed("a value is nested too deeply", self._at)
                if end + _NUMBER_TAIL < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._read()

    def _next(self) -> str:
        """Return the next character that is no space; "" at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _read(self) -> None:
        """Drop the text before the position and read as much again, so that a long value is not scanned too often."""
        rest = self._text[self._at :]
        data = self._file.read(max(_BLOCK, len(rest)))
        self._ended = not data
        self._passed += self._at
        self._text = rest + self._decoder.decode(data, final=self._ended)
        self._at = 0

    def _malformed(self, what: str, at: int) -> ValueError:
        if self._ended and (at >= len(self._text) or what.startswith("Unterminated")):
            return ValueError(f"it ends in its middle, after {self._passed + len(self._text)} characters")
        return ValueError(f"{what} at character {self._passed + at}")


#: The fields of images and annotations that are kept. COCO's other fields are for other tasks.
_IMAGE_FIELDS = ("id", "file_name", "width", "height")
_ANNOTATION_FIELDS = ("id", "category_id", "bbox", "area", "iscrowd")
#: Pages that SQLite keeps in memory, KiB.
_CACHE_KIB = 32 * 1024
#: Integers of SQLite and of other JSON readers have 64 bits.
_ID_LIMIT = 2**63

# Ids have columns without a type: SQLite would convert texts of digits to numbers in a typed one.
_TABLES = """
create table image (position integer primary key, id unique, meta blob);
create table annotation (position integer primary key, image, meta blob);
"""
_ORPHAN = "select image from annotation where image not in (select id from image) limit 1"
_IMAGES = "select id, meta from image where position >= ? order by position"
_ANNOTATIONS = "select meta from annotation where image = ? order by position"


class CocoImporter:
    """Reads COCO's `instances_*.json`: one sample for each image, in the file's order.

    Annotations: `image_id`, `file_name`, `width`, `height` and `annotations`, a list of COCO's own records.
    `info` has `categories`. Ids are integers of 64 bits or texts, and keep their type and spelling: 7, "7" and "007"
    are three images.

    The file may be larger than memory and have its arrays in any order. It is read once, as a stream, into a temporary
    SQLite file, which joins images with their annotations and is about as large as the fields that are kept.

    Args:
        annotations: the file; a path or a URL.
        images: the directory that `file_name` is relative to.
        segmentation: keep the outlines of objects too, which are most of the file.
        options: fsspec's options for both.
    """

    def __init__(
        self,
        annotations: str | os.PathLike[str],
        *,
        images: str | os.PathLike[str],
        segmentation: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_type("segmentation", segmentation, bool, "True or False")
        folder, self._name = split_name(str(annotations))
        self._files = Files(folder, options)
        self._kept = (*_ANNOTATION_FIELDS, "segmentation") if segmentation else _ANNOTATION_FIELDS
        #: id → its record
        self._categories: dict[Any, dict[str, Any]] = {}
        #: number → the first annotation that has it
        self._used_categories: dict[Any, int] = {}
        self._total: int | None = None
        self._images = Files(images, options)
        self.options = self._images.options
        self.root: str | None = self._images.url
        self.source = {
            "importer": "coco",
            "annotations": join_url(self._files.url, self._name),
            "root": self.root,
            "segmentation": segmentation,
        }

    def extend(self, info: Mapping[str, Any]) -> None:
        """Do nothing: samples of this kind do not depend on those before them."""

    def items(self, start: int = 0) -> Iterator[Item]:
        check_folder(self._images)
        with self._joined() as database:
            for image, encoded in database.execute(_IMAGES, (start,)):
                meta = msgspec.json.decode(encoded, type=dict[str, Any])
                found = database.execute(_ANNOTATIONS, (image,))
                meta["annotations"] = [msgspec.Raw(record) for (record,) in found]
                yield Item(path=meta["file_name"], meta=meta)

    def total(self) -> int | None:
        return self._total

    def info(self) -> Mapping[str, Any]:
        return {"categories": [*self._categories.values()]}

    @contextmanager
    def _joined(self) -> Iterator[sqlite3.Connection]:
        """Open the file as tables."""
        # A file without a name, which the system removes however the process ends.
        with closing(sqlite3.connect("")) as database:
            for setting in ("journal_mode = off", "synchronous = off", f"cache_size = -{_CACHE_KIB}"):
                database.execute(f"pragma {setting}")
            database.executescript(_TABLES)
            self._fill(database)
            database.execute("create index annotation_image on annotation (image)")
            orphan = database.execute(_ORPHAN).fetchone()
            if orphan is not None:
                raise self._malformed(f"there are annotations of image {orphan[0]!r}, which it does not list")
            self._check_categories()
            self._total = database.execute("select count(*) from image").fetchone()[0]
            yield database

    def _check_categories(self) -> None:
        for category, position in self._used_categories.items():
            if category not in self._categories:
                raise self._malformed(
                    f"number {position} of 'annotations' has category_id {category!r}, which 'categories' do not have"
                )

    def _fill(self, database: sqlite3.Connection) -> None:
        self._categories, self._used_categories = {}, {}
        positions = {"images": 0, "annotations": 0, "categories": 0}
        for array, record in self._records():
            position = positions[array]
            positions[array] += 1
            try:
                self._insert(database, array, record, position)
            except KeyError as error:
                raise self._malformed(f"number {position} of {array!r} has no {error}") from error
            except ValueError as error:
                raise self._malformed(f"number {position} of {array!r}: {error}") from error
            except sqlite3.IntegrityError as error:
                raise self._malformed(f"it lists image {record['id']!r} twice") from error

    def _insert(self, database: sqlite3.Connection, array: str, record: Any, position: int) -> None:
        if not isinstance(record, dict):
            raise ValueError(f"it is {record!r:.80}; give an object")
        if array == "categories":
            _check_id(record, "id")
            if (before := self._categories.setdefault(record["id"], record)) != record:
                raise ValueError(f"category {record['id']!r} is {record!r:.80}, and was {before!r:.80} before")
        elif array == "images":
            _check_image(record)
            meta = {field: record[field] for field in _IMAGE_FIELDS if field in record}
            row = (
                position,
                meta.pop("id"),
                self._encoded({"image_id": record["id"], **meta}, array, position),
            )
            database.execute("insert into image values (?, ?, ?)", row)
        else:
            _check_annotation(record)
            self._used_categories.setdefault(record["category_id"], position)
            meta = {field: record[field] for field in self._kept if field in record}
            row = (position, record["image_id"], self._encoded(meta, array, position))
            database.execute("insert into annotation values (?, ?, ?)", row)

    def _encoded(self, meta: dict[str, Any], array: str, position: int) -> bytes:
        return bytes(encode_annotations(meta, f"number {position} of {array!r} in {self.source['annotations']}"))

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


def _check_image(record: dict[str, Any]) -> None:
    """Raise KeyError or ValueError for an invalid image."""
    _check_id(record, "id")
    if not isinstance(record["file_name"], str) or not record["file_name"]:
        raise ValueError(f"file_name is {record['file_name']!r:.80}; give a path")


def _check_annotation(record: dict[str, Any]) -> None:
    """Raise KeyError or ValueError for an invalid annotation."""
    _check_id(record, "image_id")
    _check_id(record, "category_id")
    box = record["bbox"]
    is_box = isinstance(box, list) and len(box) == 4
    if not is_box or not all(type(side) in (int, float) for side in box):
        raise ValueError(f"bbox is {box!r:.80}; give [x, y, width, height], four numbers")


def _check_id(record: dict[str, Any], field: str) -> None:
    value = record[field]
    if type(value) not in (int, str) or (isinstance(value, int) and not -_ID_LIMIT <= value < _ID_LIMIT):
        raise ValueError(f"{field} is {value!r:.80}; give an integer of 64 bits, or text")
