"""Importers: what is found in trees and iterables, by which names, and what is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import check_starts
from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft, verify
from torch_dpflow.datasets.importers import IMPORTERS, Item, importer_class, make_importer
from torch_dpflow.datasets.importers.coco import CocoImporter
from torch_dpflow.datasets.importers.folders import ImageFolderImporter, SpeechImporter
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.errors import OptionError, SourceError, StorageError

datasets = Later("torchvision.datasets")


def _write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    _write(root, "dog/b.jpg", "dog/a.PNG", "dog/deep-er/a.jpg", "dog/deep/z.jpg", "dog/deep/er/a.webp")
    _write(root, "cat/10.jpg", "cat/9.jpg", "cat/notes.txt", "ant/#1 50%?.jpg", "readme.jpg", "dog/.hidden.jpg")
    return root


def test_image_trees_are_read_as_torchvision_does(pets: Path) -> None:
    _write(pets, ".ant/.deep/.0.jpg", ".ant/..0.jpg", "...ant/0.jpg")
    importer = ImageFolderImporter(str(pets))
    theirs = datasets.ImageFolder(str(pets))
    found = check_starts(importer)
    assert [(f"{pets}/{item.path}", item.meta["label"]) for item in found] == theirs.samples
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


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("cat/a.jpg", "table.csv", "table.parquet", "instances.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    importers = [
        ImageFolderImporter(str(tmp_path)),
        ListingImporter(str(tmp_path / "table.csv")),
        ListingImporter(str(tmp_path / "table.parquet")),
        CocoImporter(str(tmp_path / "instances.json"), images=str(tmp_path)),
    ]
    for importer in importers:
        with pytest.raises(StorageError, match="this is a pipe, socket or device; give a regular file"):
            list(importer.items())


def test_links_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    _write(tmp_path, "cat/a.jpg")
    (tmp_path / "cat/empty.jpg").write_bytes(b"")
    assert len(list(ImageFolderImporter(str(tmp_path)).items())) == 2
    (tmp_path / "cat/gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    with pytest.raises(SourceError, match=r"cat/gone\.jpg is a link that leads nowhere"):
        list(ImageFolderImporter(str(tmp_path)).items())


def test_endings_need_no_dot(tmp_path: Path, pets: Path, speech: Path) -> None:
    assert {str(item.path)[-4:] for item in ImageFolderImporter(str(pets), endings=["PNG", ".jpg"]).items()} == {
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


def test_appended_classes_get_the_labels_that_follow(pets: Path, tmp_path: Path, local_store: DatasetStore) -> None:
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
    found = check_starts(SpeechImporter(str(speech)))
    assert [item.meta["utterance"] for item in found] == sorted(path.stem for path in speech.glob("*/*/*.flac"))
    assert found[0].path == "103/1240/103-1240-0000.flac"
    assert found[0].meta == {
        "utterance": "103-1240-0000",
        "speaker": "103",
        "chapter": "1240",
        "text": "SOME WORDS 103-1240-0000",
    }


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\u3000"])
def test_words_of_a_transcript_are_kept_whole(tmp_path: Path, start: str, end: str, inside: str) -> None:
    _write(tmp_path, "1/2/1-2-0.flac", "1/2/1-2-1.flac")
    text = f"{start}1-2-0 ONE{inside}TWO{inside}{end}1-2-1 THREE{end}"
    (tmp_path / "1/2/1-2.trans.txt").write_bytes(text.encode())
    texts = [item.meta["text"] for item in SpeechImporter(tmp_path).items()]
    assert texts == [f"ONE{inside}TWO{inside}", "THREE"]


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
    of_shards = {"litdata", "mds", "tfrecord", "webdataset"}  # which look at their files: see tests/datasets/formats
    assert {importer.source["importer"] for importer in made} == IMPORTERS.keys() - of_shards
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


@pytest.mark.parametrize("kind", ["csv", "parquet", "parquet directory", "coco", "speech"])
def test_an_import_does_not_continue_with_corrected_labels(
    tmp_path: Path, local_store: DatasetStore, kind: str
) -> None:
    """Labels of the first samples would be the old ones, also if those where the import stopped are equal."""

    def importer(label: int) -> Any:
        labels = [label if number < 3 else 0 for number in range(9)]
        if kind == "coco":
            boxes = [{"image_id": n, "category_id": one, "bbox": [0, 0, 1, 1]} for n, one in enumerate(labels)]
            images = [{"id": n, "file_name": f"{n}.jpg"} for n in range(9)]
            content = {"images": images, "categories": [{"id": 0}, {"id": 1}], "annotations": boxes}
            (tmp_path / "a.json").write_text(json.dumps(content))
            return CocoImporter(tmp_path / "a.json", images=tmp_path)
        if kind == "speech":
            (folder := tmp_path / "speech/1/2").mkdir(parents=True, exist_ok=True)
            for n in range(9):
                (folder / f"{n}.flac").write_bytes(b"sound")
            (folder / "1-2.trans.txt").write_text("".join(f"{n} {one}\n" for n, one in enumerate(labels)))
            return SpeechImporter(tmp_path / "speech")
        if kind == "csv":
            lines = ["path,label", *(f"{n}.jpg,{one}" for n, one in enumerate(labels))]
            (tmp_path / "a.csv").write_text("\n".join(lines))
            return ListingImporter(tmp_path / "a.csv")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table({"path": [f"{n}.jpg" for n in range(9)], "label": labels})
        (tmp_path / "rows").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / "rows/a.parquet")
        return ListingImporter(tmp_path / "rows/a.parquet" if kind == "parquet" else f"{tmp_path}/rows/")

    class Stop(Exception):
        """The import is killed."""

    def stops(samples: int) -> None:
        if samples == 6:
            raise Stop

    with pytest.raises(Stop):
        Draft(local_store, "core/labels", "v1").add("train", importer(0), shard_size=3, progress=stops)
    with pytest.raises(OptionError, match="an unfinished import is in the way"):
        Draft(local_store, "core/labels", "v1").add("train", importer(1), shard_size=3)
