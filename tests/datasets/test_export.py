"""Exports are read by other libraries and by ours: every sample is equal, or its export is refused by name."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.datasets.formats.tars import members_of, samples_of, write_tar
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset, open_dataset
from torch_dpflow.datasets.export import export
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.datasets.importers.tfrecord import TFRecordImporter, masked_crc32c
from torch_dpflow.datasets.importers.webdataset import WebDatasetImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.errors import OptionError, OptionTypeError, SourceError, StorageError, TruncatedObjectError

PNG = b"\x89PNG\r\n\x1a\n"
Samples = list[tuple[bytes, dict[str, Any]]]


def samples(count: int) -> Samples:
    return [
        (
            PNG + bytes([number % 256]) * number * 7,
            {
                "label": number,
                "score": number if number % 2 else number / 4,
                "text": f"é {number}\n",
                "big": 2**63 + number,
                "boxes": [{"at": [number, 0.5], "name": None}] * (number % 3),
                **({} if number % 4 else {"only": {"a": True}}),
            },
        )
        for number in range(count)
    ]


def stored_of(store: DatasetStore, content: Iterable[Any], *, id: str = "core/x") -> StoredDataset:
    draft = Draft(store, id, "v1")
    draft.add("train", IterableImporter(content), shard_size=7)
    draft.publish()
    return store.open(f"{id}:v1:train")


def filled(value: Any, like: Any) -> Any:
    """Return what a table has of annotations: the fields that they lack are null."""
    if isinstance(like, dict) and isinstance(value, dict):
        return {name: filled(value.get(name), inner) for name, inner in like.items()}
    if isinstance(like, list) and isinstance(value, list):
        return [filled(one, inner) for one, inner in zip(value, like, strict=True)]
    return value


def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in value.items() if one is not None}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_shards_equal_the_samples(store: DatasetStore, tmp_path: Path) -> None:
    given = samples(30)
    shown: list[int] = []
    exported = export(
        stored_of(store, given), tmp_path / "out", format="webdataset", samples_per_file=12, progress=shown.append
    )
    assert exported.files == ["train-000000.tar", "train-000001.tar", "train-000002.tar"]
    assert (exported.samples, exported.kept, shown) == (30, 0, [12, 24, 30])
    dataset = open_dataset(tmp_path / "out", index_dir=tmp_path / "index")
    found = [dataset[number] for number in range(len(dataset))]
    assert [(one["__key__"], one["png"], json.loads(one["json"])) for one in found] == [
        (f"{number:09d}", *sample) for number, sample in enumerate(given)
    ]
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as archive:
        assert {(member.mtime, member.uid, member.mode) for member in archive} == {(0, 0, 0o644)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves files to be collected
def test_webdataset_reads_every_sample(local_store: DatasetStore, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    given = samples(20)
    export(stored_of(local_store, given), tmp_path / "out", format="webdataset", samples_per_file=8)
    shards = webdataset.WebDataset(str(tmp_path / "out/train-{000000..000002}.tar"), shardshuffle=False)
    assert [(one["png"], json.loads(one["json"])) for one in shards] == given


def imported_shards(store: DatasetStore, source: Any, *, id: str = "core/shards") -> StoredDataset:
    draft = Draft(store, id, "v1")
    draft.add("train", WebDatasetImporter(source))
    draft.publish()
    return store.open(f"{id}:v1")


@pytest.mark.parametrize("size", [None, 2, 100])
def test_members_of_webdataset_stay_as_they_are(local_store: DatasetStore, tmp_path: Path, size: int | None) -> None:
    """Keys begin again in each shard, which is common; a shard has no key twice."""
    (tmp_path / "in").mkdir()
    given = []
    for shard in range(3):
        of_shard = [{**one, "long.txt": b"x" * 300 * shard} for one in samples_of(0, 5, seed=shard)]
        write_tar(tmp_path / "in" / f"{shard}.tar", members_of(of_shard))
        given += of_shard
    export(imported_shards(local_store, tmp_path / "in"), tmp_path / "out", format="webdataset", samples_per_file=size)
    dataset = open_dataset(tmp_path / "out", index_dir=tmp_path / "index")
    assert [dataset[number] for number in range(len(dataset))] == given
    again = imported_shards(local_store, tmp_path / "out", id="core/again")
    before = local_store.open("core/shards:v1")
    for one, other in zip(SampleReader(before), SampleReader(again), strict=True):
        assert one[0] == other[0]
        one[1].pop("__parts__"), other[1].pop("__parts__")  # places in shards
        assert one[1] == other[1]


def test_members_are_columns_of_parquet(local_store: DatasetStore, tmp_path: Path) -> None:
    given = [{**one, "note.txt": b"n" * number * 100} for number, one in enumerate(samples_of(0, 6))]
    write_tar(tmp_path / "a.tar", members_of(given))
    export(imported_shards(local_store, tmp_path / "a.tar"), tmp_path / "out", format="parquet", annotations="json")
    table = TableDataset(tmp_path / "out")
    found = [table[number] for number in range(len(table))]
    for row, one in zip(found, given, strict=True):
        assert row["data"] == {"bytes": one["jpg"], "path": f"{one['__key__']}.jpg"}
        assert (row["cls"], row["mask.png"], row["note.txt"]) == (
            one["cls"].decode(),
            one["mask.png"],
            one["note.txt"],  # bytes, as some are longer than texts that annotations hold
        )


def test_parquet_equals_the_samples(store: DatasetStore, tmp_path: Path) -> None:
    from pyarrow import parquet

    given = samples(30)
    exported = export(
        stored_of(store, given), tmp_path / "out", format="parquet", samples_per_file=20, row_group_size="3KiB"
    )
    assert exported.files == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    table = TableDataset(tmp_path / "out")
    assert len(table.blocks) > 2
    rows = [table[number] for number in range(30)]
    whole = parquet.read_table(tmp_path / "out" / exported.files[0], page_checksum_verification=True)
    assert whole.to_pylist() == rows[:20]
    for number, (row, (data, meta)) in enumerate(zip(rows, given, strict=True)):
        assert row.pop("image") == {"bytes": data, "path": f"{number:09d}.png"}
        assert row == filled(meta, row)
        assert {*meta} <= {*row}
    draft = Draft(store, "core/again", "v1")
    draft.add("train", ListingImporter(f"{tmp_path}/out/", data_column="image.bytes"))
    draft.publish()
    for (data, found), (before, meta) in zip(SampleReader(store.open("core/again:v1")), given, strict=True):
        found.pop("image")
        assert (data, found) == (before, without_nulls(meta))


@pytest.mark.slow
def test_huggingface_reads_images_and_annotations(
    local_store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread that stays
    given = []
    for number in range(6):
        file = io.BytesIO()
        image.new("RGB", (number + 1, 2)).save(file, "PNG")
        given.append((file.getvalue(), {"label": number}))
    export(stored_of(local_store, given), tmp_path / "out", format="parquet", samples_per_file=4)
    found = datasets.Dataset.from_parquet(
        [str(path) for path in sorted((tmp_path / "out").glob("*.parquet"))], cache_dir=str(tmp_path / "cache")
    )
    assert [(one["image"].size, one["label"]) for one in found] == [((n + 1, 2), n) for n in range(6)]
    raw = found.cast_column("image", datasets.Image(decode=False))
    assert [one["image"]["bytes"] for one in raw] == [data for data, _ in given]


def test_objects_keep_their_endings(local_store: DatasetStore, tmp_path: Path) -> None:
    names = ["a/x.JPEG", "b.c/y", "z.tar.gz", "0001"]
    items = []
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"fLaC" + name.encode())
        items.append(Item(path=tmp_path / name))
    stored = stored_of(local_store, items)
    with pytest.raises(OptionError, match=r"no length of sample 0.*samples_per_file"):
        export(stored, tmp_path / "out", format="webdataset")
    export(stored, tmp_path / "out", format="webdataset", samples_per_file=9)
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as archive:
        endings = [name.partition(".")[2] for name in archive.getnames()]
    assert endings == ["jpeg", "json", "flac", "json", "gz", "json", "flac", "json"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.sampled_from("uvw"), VALUES, max_size=2), min_size=1, max_size=4))
def test_annotations_are_equal_or_refused(
    tmp_path_factory: pytest.TempPathFactory, given: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("export")
    stored = stored_of(DatasetStore.create(folder / "store"), [(b"1", one) for one in given])
    export(stored, folder / "json", format="parquet", annotations="json")
    texts = TableDataset(folder / "json")
    assert [json.loads(texts[number]["annotations"]) for number in range(len(given))] == given
    try:
        export(stored, folder / "out", format="parquet")
    except SourceError as error:
        refused = str(error)
        assert not (folder / "out").exists()
        assert re.search("sample [0-9].*annotations='json'", refused)
        return
    table = TableDataset(folder / "out")
    for number, meta in enumerate(given):
        row = table[number]
        assert row.pop("data")["bytes"] == b"1"
        assert row == filled(meta, row)
        assert {*meta} <= {*row}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1}, {"a": "1"}, "sample 1: a is a text, and an integer in sample 0"),
        ({"a": [{"b": 1}]}, {"a": [{"b": []}]}, r"sample 1: a\[\].b is a list, and an integer in sample 0"),
        ({"a": -1}, {"a": 2**63}, "sample 1: a has no type of 64 bits"),
        ({"a": 2**53 + 1}, {"a": 0.5}, "sample 1: a has no type of 64 bits.*fractions"),
        ({"a": 1}, {"b": {}}, "sample 1: b is an object without fields"),
        ({"a": 1}, {"data": 1}, "has the annotation 'data'"),
        ({"a": 1}, {str(n): n for n in range(10_001)}, "at most 10000 columns"),
    ],
)
def test_annotations_without_a_common_type(
    local_store: DatasetStore, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    stored = stored_of(local_store, [(b"x", first), (b"y", second)])
    with pytest.raises(SourceError, match=message):
        export(stored, tmp_path / "out", format="parquet")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_an_interrupted_export_goes_on(store: DatasetStore, tmp_path: Path, format: Any) -> None:
    stored = stored_of(store, samples(30))
    export(stored, tmp_path / "whole", format=format, file_size="9KiB")
    ends: list[int] = []

    def interrupt(done: int) -> None:
        ends.append(done)
        if len(ends) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(stored, tmp_path / "out", format=format, file_size="9KiB", progress=interrupt)
    (tmp_path / "out" / ".train-000007.tar.0a0b0c0d.unfinished").write_bytes(b"half")  # as a killed writer leaves it
    again = export(stored, tmp_path / "out", format=format, file_size="9KiB")
    assert again.kept == 2 < len(again.files)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert export(stored, tmp_path / "out", format=format, file_size="9KiB").kept == len(again.files)


class Killed(BaseException):
    pass


class Host(AbstractFileSystem):
    """A host with disks, as sftp and hdfs: a put opens the file at its name, and a killed writer leaves a half."""

    protocol = "host"
    cachable = False
    puts_left = 10**9

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        Host.puts_left -= 1
        LocalFileSystem().pipe_file(path, value if Host.puts_left > 0 else value[: len(value) // 2])
        if Host.puts_left <= 0:
            raise Killed

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        LocalFileSystem().mv(path1, path2)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return LocalFileSystem().ls(path, detail=detail)

    def info(self, path: str, **kwargs: Any) -> Any:
        return LocalFileSystem().info(path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        return LocalFileSystem().cat_file(path, start, end)

    def _rm(self, path: str) -> None:
        LocalFileSystem().rm(path)


class HostWithoutRename(Host):
    protocol = "unnamed"
    mv = AbstractFileSystem.mv


@pytest.mark.parametrize("kind", [Host, HostWithoutRename])
@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_an_export_that_was_killed_at_any_put_leaves_no_half(
    local_store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Host], format: Any
) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    stored = stored_of(local_store, samples(20))
    names = export(stored, tmp_path / "whole", format=format, file_size="9KiB").files
    assert len(names) == 5
    whole = contents(tmp_path / "whole")
    for put in range(1, len(whole) + 1):
        target = f"{kind.protocol}://{tmp_path}/{put}"
        (tmp_path / f"{put}").mkdir()
        monkeypatch.setattr(Host, "puts_left", put)
        with pytest.raises(Killed):
            export(stored, target, format=format, file_size="9KiB")
        monkeypatch.setattr(Host, "puts_left", 10**9)
        again = export(stored, target, format=format, file_size="9KiB")
        assert contents(tmp_path / f"{put}") == whole, put
        assert again.kept == (max(0, put - 2) if kind is Host else 0)


class Full(Host):
    """A disk that becomes full: the put fails, and so does no other."""

    protocol = "full"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        try:
            super().pipe_file(path, value, mode)
        except Killed:
            raise OSError(errno.ENOSPC, "the disk is full") from None


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_an_export_that_fails_in_its_first_file_leaves_nothing(
    local_store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    stored = stored_of(local_store, samples(20))
    damaged = stored_of(local_store, samples(20), id="core/y")
    *_, pack = sorted(Path(local_store.url.removeprefix("file://")).glob("core/y/data/v1/train/pack-0-*.bin"))
    os.truncate(pack, pack.stat().st_size - 1)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "new/deeper"):
        with pytest.raises(TruncatedObjectError):
            export(damaged, tmp_path / target, format=format)
    fsspec.register_implementation(Full.protocol, Full, clobber=True)
    for put in (1, 2):
        monkeypatch.setattr(Host, "puts_left", put)
        with pytest.raises(StorageError, match="the disk is full"):
            export(stored, f"full://{tmp_path}/empty", format=format)
    assert (contents(tmp_path / "empty"), (tmp_path / "new").exists()) == ({}, False)


@pytest.mark.parametrize("put", [1, 2])
def test_a_killed_export_that_has_written_no_file_keeps_no_other_from_its_place(
    local_store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: int
) -> None:
    fsspec.register_implementation(Host.protocol, Host, clobber=True)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Host, "puts_left", put)
    with pytest.raises(Killed):
        export(stored_of(local_store, samples(20)), f"host://{tmp_path}/out", format="webdataset")
    assert len(contents(tmp_path / "out")) == put
    other = stored_of(local_store, samples(9), id="core/y")
    export(other, tmp_path / "out", format="webdataset")
    export(other, tmp_path / "whole", format="webdataset")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_export_does_not_mix_with_others(local_store: DatasetStore, tmp_path: Path) -> None:
    stored = stored_of(local_store, samples(4))
    other = stored_of(local_store, samples(5), id="core/y")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "train-000000.tar").write_bytes(b"")
    with pytest.raises(OptionError, match=r"has train-000000.tar, which no export"):
        export(stored, tmp_path / "taken", format="webdataset")
    export(stored, tmp_path / "out", format="webdataset")
    before = contents(tmp_path / "out")
    for one, options in ((other, {}), (stored, {"samples_per_file": 2})):
        with pytest.raises(OptionError, match="has another export of 'train'"):
            export(one, tmp_path / "out", format="webdataset", **options)
    (tmp_path / "out" / "train-000007.tar").write_bytes(b"")
    with pytest.raises(OptionError, match=r"has train-000007.tar next to the export"):
        export(stored, tmp_path / "out", format="webdataset")
    (tmp_path / "out" / "train-000007.tar").unlink()
    assert contents(tmp_path / "out") == before


def test_an_object_store_as_the_target(store: DatasetStore, store_url: str) -> None:
    stored = stored_of(store, samples(9))
    target = f"{store_url}-out"
    exported = export(stored, target, format="parquet", samples_per_file=5)
    assert [TableDataset(target)[number]["label"] for number in (0, 8)] == [0, 8]
    assert export(stored, target, format="parquet", samples_per_file=5).kept == len(exported.files) == 2
    Files(target).remove("")


def test_members_that_webdataset_could_not_read(local_store: DatasetStore, tmp_path: Path) -> None:
    stored = stored_of(local_store, [(b"{}", {})])
    with pytest.raises(SourceError, match=r"sample 0 .* has two members 'json'"):
        export(stored, tmp_path / "out", format="webdataset", main="json")
    stored = stored_of(local_store, [(PNG, {"a": "b"})], id="core/y")
    export(stored, tmp_path / "named", format="webdataset", main="left.png")
    dataset = open_dataset(tmp_path / "named", index_dir=tmp_path / "index")
    assert dataset[0] == {"__key__": "000000000", "left.png": PNG, "json": b'{"a":"b"}'}
    assert DatasetReader(dataset.stored)[0][0] == PNG


def _masked(data: bytes) -> bytes:
    return masked_crc32c(data).to_bytes(4, "little")


def test_records_of_other_libraries_are_refused(local_store: DatasetStore, tmp_path: Path) -> None:
    payload, length = b"record", (6).to_bytes(8, "little")
    (tmp_path / "a.tfrecord").write_bytes(length + _masked(length) + payload + _masked(payload))
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", TFRecordImporter(tmp_path / "a.tfrecord"))
    draft.publish()
    with pytest.raises(OptionError, match="has records of tfrecord, which other libraries cannot read"):
        export(local_store.open("core/x:v1"), tmp_path / "out", format="webdataset")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "zip"}, OptionError),
        ({"main": "a/b"}, OptionError),
        ({"main": ""}, OptionError),
        ({"samples_per_file": 0}, OptionError),
        ({"samples_per_file": 1.5}, OptionTypeError),
        ({"file_size": "5GiB"}, OptionError),
        ({"file_size": 5}, OptionTypeError),
        ({"row_group_size": "2GiB"}, OptionError),
        ({"annotations": "yaml"}, OptionError),
    ],
)
def test_options_that_are_refused(
    local_store: DatasetStore, tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    stored = stored_of(local_store, samples(1))
    with pytest.raises(error, match=f"{next(iter(options))}="):
        export(stored, tmp_path / "out", **{"format": "webdataset", **options})
    assert not (tmp_path / "out").exists()
