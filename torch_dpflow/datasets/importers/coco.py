"""Importer of images with COCO's detection annotations."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from torch_dpflow._core.checks import TOO_DEEP, check_type, is_too_deep
from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import BaseImporter, Item
from torch_dpflow.datasets.importers.folders import check_folder
from torch_dpflow.datasets.importers.sources import state_of_objects
from torch_dpflow.datasets.storage.urls import join_url, split_name
from torch_dpflow.errors import SourceError

#: The fields of images and annotations that are kept. COCO's other fields are for other tasks.
_IMAGE_FIELDS = ("file_name", "width", "height")
_ANNOTATION_FIELDS = ("id", "category_id", "bbox", "area", "iscrowd")
#: Integers of other JSON readers have 64 bits.
_ID_LIMIT = 2**63


class CocoImporter(BaseImporter):
    """Importer of COCO's `instances_*.json`: one sample for each image, in the file's order.

    Annotations: `image_id`, `file_name`, `width`, `height`, and `annotations`, a list of COCO's records with `id`,
    `category_id`, `bbox`, `area` and `iscrowd`. `info` has `categories`. Ids are integers of 64 bits or texts: 7, "7"
    and "007" are three images. The import takes about six times the file's size in memory.

    Args:
        annotations: the file; a path or a URL.
        images: the directory that `file_name` is relative to.
        segmentation: whether to keep the outlines of objects, which are most of the file.
        options: fsspec's options for `annotations` and `images`.
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
        self._categories: list[dict[str, Any]] = []
        self._total: int | None = None
        self._images = Files(images, options)
        self.options = self._images.options
        self.root: str | None = self._images.url
        self._segmentation = segmentation
        self._url = join_url(self._files.url, self._name)

    @functools.cached_property
    def source(self) -> Mapping[str, Any]:
        """See `Importer.source`. The value of `state` changes with the size or state of the file of annotations."""
        return {
            "importer": "coco",
            "annotations": self._url,
            "root": self.root,
            "segmentation": self._segmentation,
            "state": state_of_objects(self._files, [self._name]),
        }

    def items(self, start: int = 0) -> Iterator[Item]:
        check_folder(self._images)
        images, annotations = self._joined()
        self._total = len(images)
        for number, image in islice(images.items(), start, None):
            meta = {field: image[field] for field in _IMAGE_FIELDS if field in image}
            yield Item(path=image["file_name"], meta={"image_id": number, **meta, "annotations": annotations[number]})

    def total(self) -> int | None:
        return self._total

    def info(self) -> Mapping[str, Any]:
        return {"categories": self._categories}

    def _joined(self) -> tuple[dict[Any, dict[str, Any]], dict[Any, list[msgspec.Raw]]]:
        """Return images and their annotations by the image's id. Raises SourceError."""
        content = self._content()
        images: dict[Any, dict[str, Any]] = {}
        for _, image in self._records(content, "images", _check_image):
            if image["id"] in images:
                raise self._malformed(f"it lists image {image['id']!r} twice")
            images[image["id"]] = image
        categories: dict[Any, dict[str, Any]] = {}
        for position, one in self._records(content, "categories", lambda record: _check_id(record, "id")):
            if (before := categories.setdefault(one["id"], one)) != one:
                raise self._malformed(
                    f"number {position} of 'categories': category {one['id']!r} is {one!r:.80}, and was {before!r:.80} "
                    "before"
                )
        self._categories = [*categories.values()]
        annotations: dict[Any, list[msgspec.Raw]] = {number: [] for number in images}
        for position, one in self._records(content, "annotations", _check_annotation):
            if one["image_id"] not in images:
                raise self._malformed(f"there are annotations of image {one['image_id']!r}, which it does not list")
            if one["category_id"] not in categories:
                raise self._malformed(
                    f"number {position} of 'annotations' has category_id {one['category_id']!r}, which 'categories' "
                    "do not have"
                )
            kept = {field: one[field] for field in self._kept if field in one}
            where = f"number {position} of 'annotations' in {self._url}"
            annotations[one["image_id"]].append(encode_annotations(kept, where))
        return images, annotations

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(
                self._files.read(self._name).decode("utf-8-sig"),  # some tools write a byte-order mark
                parse_constant=_no_number,
                object_pairs_hook=_object,
            )
            if is_too_deep(content):
                raise RecursionError
        except FileNotFoundError as error:
            raise SourceError(f"there is no {self._url}") from error
        except RecursionError as error:
            raise self._malformed(TOO_DEEP) from error
        except ValueError as error:
            raise self._malformed(str(error)) from error
        if not isinstance(content, dict):
            raise self._malformed(f"it is {content!r:.80}; give an object")
        return content

    def _records(
        self, content: Mapping[str, Any], array: str, check: Callable[[dict[str, Any]], None]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        records = content.get(array, [])
        if not isinstance(records, list):
            raise self._malformed(f"{array!r} is {records!r:.80}; give a list")
        for position, record in enumerate(records):
            try:
                if not isinstance(record, dict):
                    raise ValueError(f"it is {record!r:.80}; give an object")
                check(record)
            except KeyError as error:
                raise self._malformed(f"number {position} of {array!r} has no {error}") from error
            except ValueError as error:
                raise self._malformed(f"number {position} of {array!r}: {error}") from error
            yield position, record

    def _malformed(self, how: str) -> SourceError:
        return SourceError(f"{self._url} is no file of COCO annotations: {how}")


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no JSON; write null or leave it out")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r:.80} twice; give each name once")
    return found


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
