"""COCO annotations: joined with their images, and what is wrong with them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.datasets.samples_source import check_starts
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.coco import CocoImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.errors import OptionTypeError, SourceError


def _coco(path: Path, images: int, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    ids = draw.sample(range(1000), images)
    document: dict[str, Any] = {"info": {"year": 2017}, "licenses": [{"id": 1}]}
    document["annotations"] = [
        {
            "id": number,
            "image_id": draw.choice(ids[1:]),
            "category_id": draw.choice([1, 18]),
            "bbox": [draw.random() * 100 for _ in range(4)],
            "area": 12.5,
            "iscrowd": 0,
            "segmentation": [[1, 2, 3.5, 4]],
        }
        for number in range(5 * images)
    ]
    document["images"] = [
        {"id": number, "file_name": f"{number:012d}.jpg", "width": 640, "height": 480, "flickr_url": "x"}
        for number in ids
    ]
    document["categories"] = [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]
    path.write_text(json.dumps(document))
    return document


def _box(**change: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], **change}


@pytest.mark.parametrize("segmentation", [False, True])
def test_coco_annotations_are_joined_with_their_images(tmp_path: Path, segmentation: bool) -> None:
    document = _coco(tmp_path / "instances.json", images=20)
    importer = CocoImporter(str(tmp_path / "instances.json"), images=str(tmp_path), segmentation=segmentation)
    found = check_starts(importer)
    assert [item.path for item in found] == [image["file_name"] for image in document["images"]]
    for item, image in zip(found, document["images"]):
        expected = [
            {name: record[name] for name in record if name != "image_id" and (segmentation or name != "segmentation")}
            for record in document["annotations"]
            if record["image_id"] == image["id"]
        ]
        records = [json.loads(bytes(record)) for record in item.meta["annotations"]]
        assert records == expected
        assert (item.meta["image_id"], item.meta["height"]) == (image["id"], 480)
    assert importer.info() == {"categories": document["categories"]}
    assert importer.total() == 20


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": [{"id": 1}]}, "number 0 of 'images' has no 'file_name'"),
        ({"images": [{"file_name": "a"}]}, "number 0 of 'images' has no 'id'"),
        ({"images": [3]}, "number 0 of 'images'"),
        ({"images": [{"id": 1, "file_name": "a"}] * 2}, "lists image 1 twice"),
        ({"annotations": [_box(image_id=-5)]}, "annotations of image -5, which it does not list"),
        ({"annotations": [{"id": 3}]}, "number 0 of 'annotations' has no 'image_id'"),
        ({"images": [{"id": 1, "file_name": 5}]}, "number 0 of 'images': file_name is 5; give a path"),
        ({"images": [{"id": 2**70, "file_name": "a"}]}, "id is 1180591620717411303424; give an integer"),
        ({"annotations": [_box(bbox=[1, 2, 3])]}, r"bbox is \[1, 2, 3\]; give \[x, y, width, height\]"),
        ({"annotations": [_box(bbox=[1, 2, 3, "4"])]}, "bbox is "),
        ({"annotations": [_box(bbox=[1, 2, 3, float("nan")])]}, "it holds NaN, which is no JSON"),
        ({"annotations": [_box(category_id=[1])]}, "category_id is "),
        ({"images": [{"id": 1.0, "file_name": "a"}]}, r"id is 1\.0; give an integer of 64 bits, or text"),
        ({"images": [{"id": -(2**63) - 1, "file_name": "a"}]}, "id is -9223372036854775809; give an integer"),
        ({"images": [{"id": True, "file_name": "a"}]}, "id is True; give an integer"),
        ({"images": [{"id": "7", "file_name": "a"}] * 2}, "lists image '7' twice"),
        ({"annotations": [_box(image_id="1")]}, "annotations of image '1', which it does not list"),
        ({"annotations": [_box(image_id=1e3)]}, r"image_id is 1000\.0; give an integer"),
        (
            {"categories": [{"id": 1, "name": "cat"}, {"id": 1, "name": "dog"}]},
            "number 1 of 'categories': category 1 is .*dog.*, and was .*cat.* before",
        ),
        ({"annotations": [{"image_id": 1, "category_id": 1}]}, "has no 'bbox'"),
        (
            {"images": [{"id": 1, "file_name": "a"}], "annotations": [_box(category_id=7)]},
            "number 0 of 'annotations' has category_id 7, which 'categories' do not have",
        ),
    ],
)
def test_what_is_wrong_with_coco_annotations_is_told(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "instances.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({**_coco(path, images=3), **change}).encode())
    with pytest.raises(SourceError, match=f"instances.json is no file of COCO annotations: .*{told}"):
        list(CocoImporter(str(path), images=str(tmp_path)).items())


#: Ids that are equal as numbers, or were once joined by rounding.
_ALIKE = [
    "12345678901234567890",
    "12345678901234567891",
    "007",
    "7",
    7,
    "7.0",
    "00000e1234567890",
    "0",
    2**63 - 1,
]


@settings(max_examples=50, derandomize=True)
@given(
    st.lists(
        st.sampled_from(_ALIKE) | st.integers(-(2**63), 2**63 - 1) | st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        min_size=1,
        max_size=12,
        unique_by=lambda value: (type(value), value),
    )
)
@example(_ALIKE)
@example(["0000e10000000000", "0000e20000000000", "000000000000000e", "1e5", "100000"])
def test_ids_keep_their_type_and_spelling(ids: list[int | str]) -> None:
    document = {
        "images": [{"id": number, "file_name": f"{place}.jpg"} for place, number in enumerate(ids)],
        "annotations": [
            {"image_id": number, "category_id": number, "bbox": [place, 0, 1, 1]} for place, number in enumerate(ids)
        ],
        "categories": [{"id": number} for number in ids],
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "instances.json"
        path.write_text(json.dumps(document))
        found = list(CocoImporter(path, images=folder).items())
    assert len(found) == len(ids)
    for place, (item, number) in enumerate(zip(found, ids)):
        (record,) = (json.loads(bytes(record)) for record in item.meta["annotations"])
        assert (item.path, record["bbox"][0]) == (f"{place}.jpg", place)
        for name, value in (("image_id", item.meta["image_id"]), ("category_id", record["category_id"])):
            assert (name, type(value), value) == (name, type(number), number)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"images": [{"id": 1, "id": 2, "file_name": "a"}]}', "an object has 'id' twice"),
        ('{"images": [], "annotations": [], "images": []}', "an object has 'images' twice"),
        ('{"images": [], 3: []}', "Expecting property name enclosed in double quotes.*char"),
        ('{"images": []} x', "Extra data.*char"),
        ("[1]", r"it is \[1\]; give an object"),
        ('{"images": 3}', "'images' is 3; give a list"),
        ("", "Expecting value"),
    ],
)
def test_names_are_texts_that_come_once(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "instances.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=f"no file of COCO annotations: {told}"):
        list(CocoImporter(path, images=tmp_path).items())


def test_file_names_may_be_absolute_below_their_root(tmp_path: Path, local_store: DatasetStore) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    images = [{"id": 1, "file_name": f"{tmp_path}/a.jpg"}]
    (tmp_path / "instances.json").write_text(json.dumps({"images": images}))
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", CocoImporter(tmp_path / "instances.json", images="/"))
    draft.publish()
    assert DatasetReader(local_store.open("core/x"))[0][0] == b"a"


def test_coco_needs_its_images_and_values_of_some_depth(tmp_path: Path) -> None:
    path = tmp_path / "instances.json"
    _coco(path, images=3)
    with pytest.raises(SourceError, match="there is no folder file:///no/such"):
        list(CocoImporter(str(path), images="/no/such").items())
    deep = ("[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 500 + "1" + "}" * 500)
    for text in ('{"images": [' + value + "]}" for value in deep):
        path.write_text(text)
        with pytest.raises(SourceError, match="nested deeper than"):
            list(CocoImporter(str(path), images=str(tmp_path)).items())
    path.write_text(
        '{"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1}], '
        '"annotations": [{"bbox": [1e999, 1, 1, 1], "image_id": 1, "category_id": 1}]}'
    )
    with pytest.raises(SourceError, match=r"number 0 of 'annotations' in .* have bbox\[0\]=inf"):
        list(CocoImporter(str(path), images=str(tmp_path)).items())


def test_a_word_keeps_no_segmentation(tmp_path: Path) -> None:
    with pytest.raises(OptionTypeError, match="segmentation='no' is of type str"):
        CocoImporter("a.json", images=tmp_path, segmentation="no")  # type: ignore[arg-type]


def test_coco_annotations_that_were_cut_short_are_told(tmp_path: Path) -> None:
    path = tmp_path / "instances.json"
    _coco(path, images=3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"no file of COCO annotations: .*char"):
        list(CocoImporter(str(path), images=str(tmp_path)).items())
    with pytest.raises(SourceError, match=r"there is no .*gone\.json"):
        list(CocoImporter(str(tmp_path / "gone.json"), images=str(tmp_path)).items())
