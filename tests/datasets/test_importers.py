"""Importers: what is found in trees, tables and annotation files, and what is wrong with them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from torchvision.datasets import ImageFolder

from torch_dpflow.datasets import DatasetStore, Draft, verify
from torch_dpflow.datasets.importers import IMPORTERS, Importer, Item, importer_class
from torch_dpflow.datasets.importers.coco import CocoImporter
from torch_dpflow.datasets.importers.image_folder import ImageFolderImporter
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.datasets.importers.registry import make_importer
from torch_dpflow.datasets.importers.speech import SpeechImporter
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError, SourceError


def _write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())


def _check_starts(importer: Importer) -> list[Item]:
    """All items; drawn from each position on they are the same."""
    items = list(importer.items())
    for start in range(len(items) + 1):
        assert list(importer.items(start)) == items[start:]
    return items


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    _write(root, "dog/b.jpg", "dog/a.PNG", "dog/deep-er/a.jpg", "dog/deep/z.jpg", "dog/deep/er/a.webp")
    _write(
        root, "cat/10.jpg", "cat/9.jpg", "cat/notes.txt", "ant/#1 50%?.jpg", "readme.jpg", "dog/.hidden.jpg"
    )
    return root


def test_image_trees_are_read_as_torchvision_does(pets: Path) -> None:
    importer = ImageFolderImporter(str(pets))
    theirs = ImageFolder(str(pets))
    found = _check_starts(importer)
    visible = [(path, label) for path, label in theirs.samples if not Path(path).name.startswith(".")]
    assert [(f"{pets}/{item.path}", item.meta["label"]) for item in found] == visible
    assert importer.info() == {"classes": theirs.classes}
    assert all(item.meta["class"] == theirs.classes[item.meta["label"]] for item in found)
    assert [item.length for item in found] == [len(str(item.path)) for item in found]


def test_links_to_directories_are_followed(pets: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "cat").symlink_to(pets / "cat")
    assert [item.path for item in ImageFolderImporter(str(linked)).items()] == ["cat/10.jpg", "cat/9.jpg"]


def test_links_that_lead_back_are_not_followed(tmp_path: Path) -> None:
    _write(tmp_path, "cat/a.jpg", "cat/deep/b.jpg")
    (tmp_path / "cat/deep/back").symlink_to(tmp_path / "cat")
    (tmp_path / "cat/deep/self").symlink_to(tmp_path / "cat/deep")
    assert [item.path for item in ImageFolderImporter(str(tmp_path)).items()] == [
        "cat/a.jpg",
        "cat/deep/b.jpg",
    ]


def test_links_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    _write(tmp_path, "cat/a.jpg")
    (tmp_path / "cat/empty.jpg").write_bytes(b"")
    assert len(list(ImageFolderImporter(str(tmp_path)).items())) == 2
    (tmp_path / "cat/gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    with pytest.raises(SourceError, match=r"cat/gone\.jpg is a link that leads nowhere"):
        list(ImageFolderImporter(str(tmp_path)).items())


def test_endings_need_no_dot(tmp_path: Path, pets: Path, speech: Path) -> None:
    assert {
        str(item.path)[-4:] for item in ImageFolderImporter(str(pets), endings=["PNG", ".jpg"]).items()
    } == {
        ".PNG",
        ".jpg",
    }
    plain, dotted = (SpeechImporter(str(speech), endings=[ending]) for ending in ("flac", ".flac"))
    assert list(plain.items()) == list(dotted.items()) != []
    for wrong in ([], [""], ["."]):
        with pytest.raises(OptionError, match="give endings such as"):
            SpeechImporter(str(speech), endings=wrong)


def test_an_empty_class_is_named(pets: Path) -> None:
    (pets / "bee").mkdir()
    with pytest.raises(SourceError, match="pets/bee holds no image"):
        list(ImageFolderImporter(str(pets)).items())
    with pytest.raises(SourceError, match="has no directories"):
        list(ImageFolderImporter(str(pets / "cat")).items())


def test_appended_classes_get_the_labels_that_follow(
    pets: Path, tmp_path: Path, local_store: DatasetStore
) -> None:
    more = tmp_path / "more"
    _write(more, "bee/1.jpg", "dog/1.jpg")
    draft = Draft(local_store, "core/pets", "v1")
    draft.add("train", ImageFolderImporter(str(pets)))
    draft.publish()
    draft = Draft(local_store, "core/pets", "v2", parent="v1")
    draft.add("train", ImageFolderImporter(str(more)))
    variant = draft.publish().variants["train"]
    assert variant.info == {"classes": ["ant", "cat", "dog", "bee"]}
    added = [sample.fields() for sample in local_store.open("core/pets").samples()][-2:]
    assert added == [{"label": 3, "class": "bee"}, {"label": 2, "class": "dog"}]
    assert list(verify(local_store.open("core/pets"), data=True)) == []


# -- COCO ---------------------------------------------------------------------------------------------------


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
    found = _check_starts(importer)
    assert [item.path for item in found] == [image["file_name"] for image in document["images"]]
    for item, image in zip(found, document["images"]):
        expected = [
            {
                name: record[name]
                for name in record
                if name != "image_id" and (segmentation or name != "segmentation")
            }
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
        ({"annotations": [{"image_id": 1, "category_id": 1}]}, "has no 'bbox'"),
        (
            {"images": [{"id": 1, "file_name": "a"}], "annotations": [_box(category_id=7)]},
            "number 0 of 'annotations' has category_id 7, which 'categories' do not have",
        ),
    ],
)
def test_what_is_wrong_with_coco_annotations_is_told(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = tmp_path / "instances.json"
    path.write_text(json.dumps({**_coco(path, images=3), **change}))
    with pytest.raises(SourceError, match=f"instances.json is no file of COCO annotations: .*{told}"):
        list(CocoImporter(str(path), images=str(tmp_path)).items())


def test_coco_needs_its_images_and_values_of_some_depth(tmp_path: Path) -> None:
    path = tmp_path / "instances.json"
    _coco(path, images=3)
    with pytest.raises(SourceError, match="there is no folder file:///no/such"):
        list(CocoImporter(str(path), images="/no/such").items())
    path.write_text('{"images": [' + "[" * 100_000)
    with pytest.raises(SourceError, match="a value is nested too deeply"):
        list(CocoImporter(str(path), images=str(tmp_path)).items())
    path.write_text(
        '{"images": [], "annotations": [{"bbox": [1e999, 1, 1, 1], "image_id": 1, "category_id": 1}]}'
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
    with pytest.raises(SourceError, match="ends in its middle"):
        list(CocoImporter(str(path), images=str(tmp_path)).items())
    with pytest.raises(SourceError, match=r"there is no .*gone\.json"):
        list(CocoImporter(str(tmp_path / "gone.json"), images=str(tmp_path)).items())


# -- speech -------------------------------------------------------------------------------------------------


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    root = tmp_path / "train-clean-100"
    for speaker, chapter, count in [("103", "1240", 3), ("1034", "12", 2), ("19", "198", 1)]:
        names = [f"{speaker}-{chapter}-{number:04d}" for number in range(count)]
        _write(root, *(f"{speaker}/{chapter}/{name}.flac" for name in names))
        lines = [f"{name} SOME WORDS {name}" for name in names]
        (root / speaker / chapter / f"{speaker}-{chapter}.trans.txt").write_text("\n".join(lines) + "\n")
    _write(root, "SPEAKERS.TXT")
    return root


def test_speech_is_joined_with_its_transcripts(speech: Path) -> None:
    found = _check_starts(SpeechImporter(str(speech)))
    assert [item.meta["utterance"] for item in found] == sorted(
        path.stem for path in speech.glob("*/*/*.flac")
    )
    assert found[0].path == "103/1240/103-1240-0000.flac"
    assert found[0].meta == {
        "utterance": "103-1240-0000",
        "speaker": "103",
        "chapter": "1240",
        "text": "SOME WORDS 103-1240-0000",
    }


def test_what_is_wrong_with_speech_is_told(speech: Path) -> None:
    extra = speech / "19/198/19-198-0009.flac"
    extra.write_bytes(b"")
    with pytest.raises(SourceError, match=r"19-198-0009\.flac has no line in a \*\.trans\.txt"):
        list(SpeechImporter(str(speech)).items())
    extra.unlink()
    (speech / "103/1240/103-1240-0001.flac").unlink()
    with pytest.raises(SourceError, match=r"audio that is missing: \['103-1240-0001'\]"):
        list(SpeechImporter(str(speech)).items())
    transcript = speech / "103/1240/103-1240.trans.txt"
    transcript.write_text("103-1240-0000 A\n103-1240-0000 B\n")
    with pytest.raises(SourceError, match=r"103-1240\.trans\.txt, line 2: 103-1240-0000 has two"):
        list(SpeechImporter(str(speech)).items())
    transcript.write_bytes(b"103-1240-0000 \xff")
    with pytest.raises(SourceError, match=r"trans\.txt is no UTF-8"):
        list(SpeechImporter(str(speech)).items())


# -- tables -------------------------------------------------------------------------------------------------


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "file": f"clips/{n}.bin",
            "label": n % 7,
            "score": n / 2,
            "name": f"a,{n}\n'x'",
            "start": 10 * n,
            "size": 10,
        }
        for n in range(count)
    ]


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=100)
    else:
        options = csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        csv.write_csv(table, path, options)


@pytest.mark.parametrize("name", ["list.csv", "list.tsv", "list.parquet"])
def test_tables_list_samples(tmp_path: Path, name: str) -> None:
    rows = _rows(30)
    if name != "list.parquet":
        for row in rows:
            row["name"] = row["name"].replace("\n", " ")
    _write_table(tmp_path / name, rows)
    importer = ListingImporter(
        str(tmp_path / name), path_column="file", offset_column="start", length_column="size"
    )
    found = _check_starts(importer)
    assert importer.root == f"file://{tmp_path}"
    for item, row in zip(found, rows, strict=True):
        assert (item.path, item.offset, item.length) == (row["file"], row["start"], 10)
        assert item.meta == {"label": row["label"], "score": row["score"], "name": row["name"]}


def test_large_tables_are_read_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    _write_table(path, [{"path": f"{n}.bin", "n": n} for n in range(10_000)])
    importer = ListingImporter(str(path))
    for start in (0, 1, 4095, 4096, 4097, 9999, 10_000):
        assert [item.meta["n"] for item in importer.items(start)] == list(range(start, 10_000))
    assert importer.total() == 10_000


def test_nulls_are_left_out(tmp_path: Path) -> None:
    _write_table(
        tmp_path / "list.parquet", [{"path": "a", "x": 1, "y": None}, {"path": "b", "x": None, "y": 2}]
    )
    found = list(ListingImporter(str(tmp_path / "list.parquet")).items())
    assert [item.meta for item in found] == [{"x": 1}, {"y": 2}]


@pytest.mark.parametrize(
    ("header", "row", "told"),
    [
        ("path,sum", "a,md5:00", "checksum='md5:00': give 'crc32:'"),
        ("path,sum", "a,12", "checksum='12'"),
        ("path,start,size", "a,-5,2", "offset=-5: give a whole number"),
        ("path,start,size", "a,five,2", "offset='five'"),
        ("path,start,size", "a,1.5,2", r"offset=1\.5"),
        ("path,start,size", "a,1,", "offset=1 without a length"),
    ],
)
def test_what_a_store_could_not_hold_is_refused_with_its_row(
    tmp_path: Path, local_store: DatasetStore, header: str, row: str, told: str
) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"{header}\n{row}\n")
    columns = {"sum": "checksum_column", "start": "offset_column", "size": "length_column"}
    settings = {columns[name]: name for name in header.split(",")[1:]}
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(SourceError, match=rf"list\.csv, row 0: {told}.*\(columns: path='path', "):
        draft.add("train", make_importer("listing", str(path), settings))
    assert local_store.versions("core/x") == []


def test_checksums_may_be_upper_case_and_paths_digits(tmp_path: Path, local_store: DatasetStore) -> None:
    (tmp_path / "list.csv").write_text("path,sum\n001,crc32:ABCDEF01\n002,\n")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(str(tmp_path / "list.csv"), checksum_column="sum"))
    draft.publish()
    samples = list(local_store.open("core/x").samples())
    assert [(sample.path, sample.checksum) for sample in samples] == [
        ("001", "crc32:abcdef01"),
        ("002", None),
    ]


def test_what_is_wrong_with_a_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("path,x\na,1\n,2\n")
    with pytest.raises(SourceError, match=r"list\.csv has no column \['file'\]; it has \['path', 'x'\]"):
        list(ListingImporter(str(path), path_column="file").items())
    with pytest.raises(SourceError, match=r"list\.csv, row 1: path='': give a path"):
        list(ListingImporter(str(path)).items())
    path.write_text("path,x\na,1,2\n")
    with pytest.raises(SourceError, match=r"list\.csv cannot be read"):
        list(ListingImporter(str(path)).items())
    with pytest.raises(SourceError, match=r"there is no .*gone\.csv"):
        list(ListingImporter(str(tmp_path / "gone.csv")).items())
    with pytest.raises(OptionError, match=r"ends with \.xlsx; give a \.csv"):
        ListingImporter("list.xlsx")


def test_nanoseconds_become_text(tmp_path: Path, local_store: DatasetStore) -> None:
    columns = {
        "path": pa.array(["a", "b"]),
        "at": pa.array([1, None], pa.timestamp("ns")),
        "zoned": pa.array([1, 2], pa.timestamp("ns", tz="UTC")),
        "whole": pa.array([2_000_000_000, None], pa.timestamp("ns")),
        "took": pa.array([-1_500_000_001, 1], pa.duration("ns")),
        "time": pa.array([1, 2], pa.time64("ns")),
    }
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(str(tmp_path / "list.parquet")))
    draft.publish()
    assert local_store.open("core/x").sample(0).fields() == {
        "at": "1970-01-01T00:00:00.000000001",
        "zoned": "1970-01-01T00:00:00.000000001Z",
        "whole": "1970-01-01T00:00:02",
        "took": "-PT1.500000001S",
        "time": "00:00:00.000000001",
    }
    nested = pa.table({"path": ["a"], "inner": pa.array([[1]], pa.list_(pa.timestamp("ns")))})
    parquet.write_table(nested, tmp_path / "list.parquet")
    with pytest.raises(SourceError, match=r"list\.parquet, column 'inner' of type list.*store it as text"):
        list(ListingImporter(str(tmp_path / "list.parquet")).items())


def test_numbers_of_a_table_that_json_cannot_hold_are_named(
    tmp_path: Path, local_store: DatasetStore
) -> None:
    table = pa.table({"path": ["a", "b"], "score": pa.array([None, float("nan")])})
    parquet.write_table(table, tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(SourceError, match=r"annotations of b have score=nan"):
        draft.add("train", ListingImporter(str(tmp_path / "list.parquet")))


def test_damaged_pages_are_told(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    table = pa.table({"path": [f"{number}.bin" for number in range(5000)]})
    parquet.write_table(table, path, use_dictionary=False, compression="gzip")
    data = bytearray(path.read_bytes())
    data[100:4000] = b"\xa5" * 3900
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"list\.parquet cannot be read"):
        list(ListingImporter(str(path)).items())


def test_without_pyarrow_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[datasets\]'"):
        next(ListingImporter(str(tmp_path / "list.csv")).items())


# -- iterables and names -------------------------------------------------------------------------------------


def test_iterables_of_bytes_and_of_items() -> None:
    given = [(b"a", {"n": 1}), Item(path="s3://b/k", meta={"n": 2}), (bytearray(b"c"), {})]
    for source in (given, tuple(given), iter(given)):
        items = list(IterableImporter(source).items())
        assert items == [Item(data=b"a", meta={"n": 1}), given[1], Item(data=b"c")]


@pytest.mark.parametrize("wrong", [3, b"a", ("a", {}), (b"a", 3), (b"a",), None])
def test_what_is_no_item_is_told(wrong: Any) -> None:
    with pytest.raises(SourceError, match=r"item 0 is .*give \(bytes, mapping"):
        list(IterableImporter([wrong]).items())


def test_path_objects_are_taken_as_paths(
    tmp_path: Path, pets: Path, speech: Path, local_store: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text('{"images": [{"id": 1, "file_name": "x.jpg"}]}')
    (tmp_path / "a.csv").write_text("path\nx.jpg\n")
    monkeypatch.chdir(tmp_path)
    for root in (pets, Path("pets")):
        items = [(root / "dog/b.jpg"), Path("dog/a.PNG")]
        pairs = [
            (ImageFolderImporter(root), ImageFolderImporter(str(pets))),
            (SpeechImporter(speech), SpeechImporter(str(speech))),
            (CocoImporter(Path("a.json"), images=root), CocoImporter("a.json", images=str(pets))),
            (ListingImporter(tmp_path / "a.csv", root=root), ListingImporter("a.csv", root=str(pets))),
            (make_importer("imagefolder", root, {}), ImageFolderImporter(str(pets))),
            (IterableImporter([], root=root), IterableImporter([], root=f"file://{pets}")),
        ]
        for ours, theirs in pairs:
            assert (ours.root, ours.source) == (theirs.root, theirs.source)
            assert [*ours.items()] == [*theirs.items()]
        draft = Draft(local_store, "core/pets", f"v{len(root.parts)}")
        draft.add(
            "train",
            IterableImporter([Item(path=path) for path in items if path.parts[0] != "pets"], root=root),
        )
        draft.publish()
        assert list(verify(local_store.open("core/pets"), data=True)) == []
    assert [sample.path for sample in local_store.open(f"core/pets:v{len(pets.parts)}").samples()] == [
        "dog/b.jpg",
        "dog/a.PNG",
    ]


def test_every_importer_is_made_from_text(tmp_path: Path, pets: Path) -> None:
    made = [
        make_importer("imagefolder", str(pets), {"endings": ".jpg,.png"}),
        make_importer("coco", "a.json", {"images": "x", "segmentation": "true"}),
        make_importer("speech", str(tmp_path), {}),
        make_importer("listing", "a.csv", {"path_column": "key"}),
        make_importer("iterable", "tests.datasets.samples_source:numbers_for_import", {"name": "n"}),
    ]
    assert [type(importer) for importer in made] == [
        importer_class(name) for name in ("imagefolder", "coco", "speech", "listing", "iterable")
    ]
    assert {importer.source["importer"] for importer in made} == IMPORTERS.keys()
    assert {str(item.path)[-4:].lower() for item in made[0].items()} == {".jpg", ".png"}
    assert made[1].source["segmentation"] is True
    assert [item.meta["number"] for item in made[4].items()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "source", "settings", "told"),
    [
        ("zip", "x", {}, "no importer 'zip'; there are"),
        ("speech", "x", {"colour": "red"}, r"speech has no setting \['colour'\]; it has \['endings'\]"),
        ("coco", "x.json", {}, r"coco needs the setting \['images'\]"),
        ("coco", "x.json", {"images": "x", "segmentation": "maybe"}, "segmentation='maybe'"),
        ("iterable", "tests.no_such:thing", {}, "cannot be imported"),
        ("iterable", "tests.new_process:gone", {}, "cannot be imported"),
        ("iterable", "nothing", {}, "cannot be imported"),
        ("iterable", "os:getpid", {}, "is no iterable"),
        ("iterable", "math:sqrt", {}, "cannot be called without arguments: TypeError"),
    ],
)
def test_what_is_wrong_with_text_is_told(name: str, source: str, settings: dict[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        make_importer(name, source, settings)
