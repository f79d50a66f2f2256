"""`open_dataset`: finding objects and formats, and indexes that are built once, continued, and built anew."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.formats.tars import members_of, samples_of, write_shards, write_tar
from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft, index_builder, open_dataset
from torch_dpflow.datasets.importers import shards
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.shards import ForwardReader
from torch_dpflow.datasets.importers.sources import SourceFile, expand_braces, find_sources
from torch_dpflow.datasets.importers.webdataset import WebDatasetImporter
from torch_dpflow.datasets.index_builder import _Builder
from torch_dpflow.errors import DamagedStoreError, OptionError, OptionTypeError, SourceError

PIL = Later("PIL.Image")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the samples that are scanned and indexed at once: a shard of seventy takes several batches."""
    monkeypatch.setattr(shards, "_BATCH", shards._BATCH // 10)
    monkeypatch.setattr(index_builder, "_BATCH", index_builder._BATCH // 10)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that gets the name of every object that is scanned, also by forked processes."""
    log = tmp_path / "scans"
    log.touch()
    scan = WebDatasetImporter.scan

    def noted(importer: WebDatasetImporter, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        with log.open("a") as out:
            out.write(f"{os.path.basename(file.url)}\n")
        return scan(importer, file, data)

    monkeypatch.setattr(WebDatasetImporter, "scan", noted)
    return log


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{00..10..5}", ["00", "05", "10"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("{x}.tar", ["{x}.tar"]),
    ],
)
def test_braces(text: str, expanded: list[str]) -> None:
    assert sorted(expand_braces(text)) == sorted(expanded)


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 6))
def test_ranges_keep_the_zeros_of_their_bounds(first: int, count: int, width: int) -> None:
    found = expand_braces(f"x{{{first:0{width}d}..{first + count:0{width}d}}}")
    bounds = [f"{bound:0{width}d}" for bound in (first, first + count)]
    is_padded = any(bound != str(int(bound)) for bound in bounds)
    wide = max(map(len, bounds)) if is_padded else 0
    assert found == [f"x{number:0{wide}d}" for number in range(first, first + count + 1)]


def test_too_many_objects_are_refused_before_they_are_named() -> None:
    with pytest.raises(OptionError, match="more than 1000000 objects"):
        expand_braces("{0..99999999999}")
    with pytest.raises(OptionError, match="braces within braces"):
        expand_braces("{a,{b,c}}")


@pytest.mark.parametrize(
    "source",
    ["data", "data/", "data/train-{000..003}.tar", "data/train-*.tar", "data/train-00[0-3].tar", "*/*.tar"],
)
def test_ways_to_name_the_same_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    write_shards(tmp_path / "data", 4, 1)
    (tmp_path / "data" / "README.md").touch()
    monkeypatch.chdir(tmp_path)
    expected = [f"train-{number:03d}.tar" for number in range(4)]
    for given_source in (source, f"file://{tmp_path}/{source}"):
        assert WebDatasetImporter(given_source).files.names == expected


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("data/train-{000..009}.tar", SourceError, r"there is no .*train-004\.tar"),
        ("data/none-*.tar", SourceError, r"nothing matches data/none-\*\.tar; check the pattern"),
        ("none/a-*.tar", SourceError, r"nothing matches none/a-\*\.tar: .*/none is missing or empty"),
        ("data/**/a.tar", OptionError, "not supported"),
        ("pipe:cat data/train-000.tar", OptionError, "commands are not run"),
        ([], OptionTypeError, "give a path"),
        ("", OptionError, "has an empty path"),
        (["data/train-000.tar", ""], OptionError, "has an empty path"),
        ("data/train-00[^1].tar", OptionError, r"give '\[!' to exclude"),
        (["data/train-000.tar", 3], OptionTypeError, "source has 3"),
        ("data/notes.bin", OptionError, "has no format that is known; give format="),
    ],
)
def test_sources_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, error: type[Exception], message: str
) -> None:
    write_shards(tmp_path / "data", 4, 1)
    (tmp_path / "data" / "notes.bin").write_bytes(b"nothing of the kind")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        open_dataset(source)


def test_a_format_is_found_by_first_bytes(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "shard", members_of(samples_of(0, 3)))
    assert len(open_dataset(path)) == 3


def test_an_index_is_built_once(tmp_path: Path, scans: Path) -> None:
    samples = write_shards(tmp_path / "data", 3, 20)
    for _ in range(2):
        dataset = open_dataset(tmp_path / "data")
        assert dataset[45] == samples[45]
    assert sorted(scans.read_text().split()) == ["train-000.tar", "train-001.tar", "train-002.tar"]
    assert pickle.loads(pickle.dumps(dataset))[59] == samples[59]


@pytest.mark.parametrize("change", ["grown", "replaced"])
def test_a_changed_shard_gets_a_new_index(tmp_path: Path, change: str) -> None:
    write_shards(tmp_path, 2, 20)
    opened = open_dataset(f"{tmp_path}/train-{{000..001}}.tar")
    path = tmp_path / "train-001.tar"
    size = path.stat().st_size
    samples = samples_of(20, 25 if change == "grown" else 20)
    if change == "replaced":
        samples = [{**sample, "mask.png": bytes(300)} for sample in samples]
    write_tar(path, members_of(samples))
    assert (path.stat().st_size == size) == (change == "replaced")
    anew = open_dataset(f"{tmp_path}/train-{{000..001}}.tar")
    assert len(anew) == 20 + len(samples)
    assert anew[25] == samples[5]
    assert anew.stored.ref.version != opened.stored.ref.version


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_shard_that_grows_while_it_is_indexed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = write_tar(tmp_path / "a.tar", members_of(samples_of(0, 3)))
    grown = write_tar(tmp_path / "grown.tar", members_of(samples_of(0, 4))).read_bytes()
    if when == "during":  # what is listed is half of a member
        path.write_bytes(grown[:700])
    scan = WebDatasetImporter.scan

    def growing(self: Any, *arguments: Any) -> Any:
        scanned = scan(self, *arguments)
        if when == "after":
            yield from scanned
        path.write_bytes(grown)
        yield from scanned

    monkeypatch.setattr(WebDatasetImporter, "scan", growing)
    with pytest.raises(SourceError, match=r"a\.tar was written while it was read"):
        open_dataset(path)
    monkeypatch.setattr(WebDatasetImporter, "scan", scan)
    assert len(open_dataset(path)) == 4


def test_a_build_that_was_killed_is_continued(tmp_path: Path, scans: Path, index_dir: Path) -> None:
    samples = write_shards(tmp_path / "data", 12, 25)

    class Killed(BaseException):
        pass

    def kill(count: int) -> None:
        if count >= 200:
            raise Killed

    with pytest.raises(Killed):
        open_dataset(tmp_path / "data", progress=kill)
    built = {path.name: path.stat().st_ino for path in index_dir.rglob("parts/*/*")}
    assert len(built) == 8
    scans.write_text("")
    dataset = open_dataset(tmp_path / "data")
    assert len(scans.read_text().split()) == 4
    after = {path.name: path.stat().st_ino for path in index_dir.rglob("parts/*/*")}
    assert built.items() < after.items()
    assert dataset.__getitems__(list(range(0, 300, 9))) == samples[::9]


@pytest.mark.parametrize("stop", [50, 100, 150, 200])
def test_a_shard_that_is_named_twice_is_counted_twice_after_a_kill_too(
    tmp_path: Path, stop: int, local_store: DatasetStore
) -> None:
    samples = write_shards(tmp_path / "data", 1, 80)
    source = [tmp_path / "data" / "train-000.tar"] * 3

    class Killed(BaseException):
        pass

    def kill(count: int) -> None:
        if count >= stop:
            raise Killed

    with suppress(Killed):
        open_dataset(source, progress=kill)
    dataset = open_dataset(source)
    assert len(dataset) == 240
    assert dataset.__getitems__(list(range(0, 240, 7))) == (samples * 3)[::7]
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(Killed):
        draft.add("train", WebDatasetImporter(source), shard_size=100, progress=kill)
    assert draft.add("train", WebDatasetImporter(source), shard_size=100).samples == 240


def _open(folder: Path, found: Any) -> None:
    found.put(open_dataset(folder)[30])


def test_processes_that_open_at_once_build_one_index(tmp_path: Path, index_dir: Path) -> None:
    samples = write_shards(tmp_path / "data", 3, 20)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    processes = [context.Process(target=_open, args=(tmp_path / "data", found)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [found.get(timeout=120) for _ in processes] == [samples[30]] * 4
    for process in processes:
        process.join()
    assert sorted(path.parent.name for path in index_dir.glob("joined/*")) == ["joined"]
    assert len([*index_dir.glob("parts/*/*")]) == 3


def _scanned(scans: Path) -> list[str]:
    found = sorted(scans.read_text().split())
    scans.write_text("")
    return found


def test_one_more_shard_reads_one_shard(tmp_path: Path, scans: Path, index_dir: Path) -> None:
    """At the end, in the middle, in place of another, and by another pattern."""
    samples = [write_shards(tmp_path / f"{number}", 1, 70, seed=number) for number in range(7)]
    tars = {number: (tmp_path / f"{number}" / "train-000.tar").read_bytes() for number in range(7)}
    data = tmp_path / "data"
    data.mkdir()

    def check(names: list[str], *contents: int, source: Any = data) -> None:
        dataset = open_dataset(source)
        assert _scanned(scans) == names
        expected = [one for number in contents for one in samples[number]]
        assert len(dataset) == len(expected)
        assert dataset.__getitems__(list(range(0, len(expected), 9))) == expected[::9]

    for number in range(3):
        (data / f"{number}.tar").write_bytes(tars[number])
    check(["0.tar", "1.tar", "2.tar"], 0, 1, 2)
    (data / "3.tar").write_bytes(tars[3])
    check(["3.tar"], 0, 1, 2, 3)
    (data / "15.tar").write_bytes(tars[4])
    check(["15.tar"], 0, 1, 4, 2, 3)
    check([], 2, 0, source=[data / "2.tar", data / "0.tar"])
    check([], 0, 1, 2, 3, source=f"{data}/?.tar")
    (data / "1.tar").write_bytes(tars[5])
    check(["1.tar"], 0, 5, 4, 2, 3)
    for name in ("15.tar", "1.tar", "3.tar"):
        (data / name).unlink()
    check([], 0, 2)
    twice = [data / "0.tar", data / "0.tar"]
    check([], 0, 0, source=twice)
    check([], 0, 2, 0, source=[data / "0.tar", data / "2.tar", data / "0.tar"])


def test_the_index_of_a_source_that_grows_does(tmp_path: Path, index_dir: Path) -> None:
    """The index grows by the new samples only; each state once stored a whole index."""
    (shard,) = [write_tar(tmp_path / "a.tar", members_of(samples_of(0, 100))).read_bytes()]
    sizes = []
    for number in range(8):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number}.tar").write_bytes(shard)
        assert len(open_dataset(tmp_path / "data")) == 100 * (number + 1)
        sizes.append(sum(path.stat().st_size for path in index_dir.rglob("parts/*/*")))
    assert sizes[-1] < 2.5 * 8 * sizes[0]


def test_an_index_that_was_not_opened_for_long_is_removed(tmp_path: Path, scans: Path, index_dir: Path) -> None:
    """With parts that no other index has, and indexes of earlier releases."""
    samples = write_shards(tmp_path / "data", 3, 70)
    (index_dir / "parts" / "of-another-process").mkdir(parents=True)
    other = open_dataset(f"{tmp_path}/data/train-000.tar")
    whole = open_dataset(tmp_path / "data")
    for age, release in ((0, "old"), (time.time(), "recent")):
        path = index_dir / "webdataset" / release / "versions" / "a.json"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (age, age))
    for path in index_dir.rglob("*"):
        if path.is_file() and path.parent.name != "versions":
            os.utime(path, (0, 0))
    kept = open_dataset(tmp_path / "data")  # is in use from now on
    (tmp_path / "data" / "train-002.tar").write_bytes((tmp_path / "data" / "train-000.tar").read_bytes())
    open_dataset(tmp_path / "data")
    names = {path.name for path in index_dir.glob("joined/*")}
    assert other.stored.name not in names
    assert (index_dir / "parts" / "of-another-process").is_dir()  # it has made it, and writes next
    assert kept.stored.name in names
    assert len([*index_dir.glob("parts/*/*")]) == 4
    assert [path.name for path in index_dir.glob("webdataset/*")] == ["recent"]
    assert whole.__getitems__(list(range(140))) == samples[:140]
    for path in index_dir.rglob("*"):
        os.utime(path, (0, 0))
    open_dataset(f"{tmp_path}/data/train-001.tar")
    assert len([*index_dir.glob("joined/*")]) == len([*index_dir.glob("parts/*/*")]) == 1
    scans.write_text("")
    assert len(open_dataset(tmp_path / "data")) == 210
    assert _scanned(scans) == ["train-000.tar", "train-002.tar"]
    assert whole.__getitems__(list(range(140))) == samples[:140]  # stays mapped


@pytest.mark.parametrize("moment", ["build", "_write_parts", "_write_part", "_put", "_join"])
def test_processes_build_one_index_on_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another one builds the same index at any moment of a build."""
    samples = write_shards(tmp_path / "data", 3, 70)
    url = f"memory://{tmp_path.name}-{moment}"
    owner: Any = _Builder
    own = getattr(owner, moment)
    runs = []

    def disturbed(*arguments: Any) -> Any:
        runs.append(moment)
        if len(runs) == 1:
            monkeypatch.setattr(owner, moment, own)
            assert len(open_dataset(tmp_path / "data", index_dir=url)) == 210
            monkeypatch.setattr(owner, moment, disturbed)
        return own(*arguments)

    monkeypatch.setattr(owner, moment, disturbed)
    try:
        assert open_dataset(tmp_path / "data", index_dir=url).__getitems__(list(range(210))) == samples
        assert runs
    finally:
        fsspec.filesystem("memory").rm(url, recursive=True)


def _flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize("parts", ["whole", "damaged", "missing"])
@pytest.mark.parametrize(
    "change",
    [lambda data: data[:100], lambda data: b"", lambda data: None, _flipped],
    ids=["cut", "empty", "missing", "flipped"],
)
def test_a_damaged_index_is_built_again(tmp_path: Path, index_dir: Path, change: Any, parts: str) -> None:
    samples = write_shards(tmp_path / "data", 1, 5)
    open_dataset(tmp_path / "data")
    (path,), (part,) = index_dir.glob("joined/*"), index_dir.glob("parts/*/*")
    changed = change(path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    if parts != "whole":
        content = _flipped(part.read_bytes())
        part.unlink()
        if parts == "damaged":
            part.write_bytes(content)
    if change is _flipped:  # no size shows it
        with pytest.raises(DamagedStoreError, match="open the data again, which builds it again"):
            open_dataset(tmp_path / "data").__getitems__(range(5))
    assert open_dataset(tmp_path / "data").__getitems__(range(5)) == samples


def test_errors_of_a_source_are_not_kept(tmp_path: Path) -> None:
    write_shards(tmp_path, 2, 5)
    path = tmp_path / "train-001.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with pytest.raises(SourceError, match=r"train-001\.tar"):
        open_dataset(f"{tmp_path}/*.tar")
    path.write_bytes(whole)
    assert len(open_dataset(f"{tmp_path}/*.tar")) == 10


def _images(folder: Path) -> Path:
    chance = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (folder / kind).mkdir(parents=True)
        for number in range(3):
            pixels = chance.integers(0, 255, (8, 6, 3), np.uint8)
            PIL.fromarray(pixels).save(folder / kind / f"{number}.png")
    return folder


def test_image_folders(tmp_path: Path) -> None:
    folder = _images(tmp_path / "pets")
    dataset = open_dataset(folder)
    content = (folder / "dog" / "0.png").read_bytes()
    assert dataset[3] == {"image": content, "label": 1, "class": "dog"}
    (folder / "cat" / "9.png").write_bytes(content)
    assert open_dataset(folder)[3] == {"image": content, "label": 0, "class": "cat"}


def test_decoded_samples(tmp_path: Path) -> None:
    folder = _images(tmp_path / "pets")
    pixels = np.asarray(PIL.open(folder / "dog" / "0.png"))
    assert np.array_equal(open_dataset(folder, decode="pil")[3]["image"], pixels)
    rgb = open_dataset(folder, decode="rgb")[3]["image"]
    assert rgb.dtype == np.uint8
    assert np.array_equal(rgb, pixels)
    tensor = open_dataset(folder, decode="torch")[3]["image"]
    assert torch.equal(tensor, torch.from_numpy(pixels.copy()).permute(2, 0, 1))
    assert open_dataset(folder, decode=lambda sample: sample["label"])[3] == 1
    with pytest.raises(OptionError, match="give one of pil, rgb, torch"):
        open_dataset(folder, decode="jpeg")


def test_decoded_members_of_shards(tmp_path: Path) -> None:
    array = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }".ljust(117) + b"\n"
    members = [
        ("a.png", (_images(tmp_path / "p") / "cat" / "0.png").read_bytes()),
        ("a.cls", b"7"),
        ("a.json", b'{"x": [1]}'),
        ("a.txt", "é".encode()),
        ("a.npy", array + b"\x01\0\0\0\x02\0\0\0"),
        ("a.bin", b"\x00\x01"),
        ("b.png", b"\x89PNG\r\n\x1a\n damaged"),
    ]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members), decode="pil", on_error="skip")
    sample = dataset[0]
    assert sample["png"].size == (6, 8)
    assert np.array_equal(sample["npy"], [1, 2])
    assert {name: sample[name] for name in ("cls", "json", "txt", "bin")} == {
        "cls": 7,
        "json": {"x": [1]},
        "txt": "é",
        "bin": b"\x00\x01",
    }
    with pytest.raises(SourceError, match=r"a\.tar.*'png' cannot be decoded"):
        dataset[1]
    assert len(dataset.__getitems__([1, 0])) == 1


def test_stored_datasets(tmp_path: Path, local_store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="needs its store"):
        open_dataset("core/x:v1")
    monkeypatch.setenv("DPFLOW_STORE", local_store.url)
    with pytest.raises(LookupError, match=re.escape(local_store.url)):
        open_dataset("core/x:v1:train")
    with pytest.raises(OptionError, match="not for stored datasets"):
        open_dataset("core/x:v1:train", format="webdataset")


def test_sources_in_memory(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    samples = samples_of(0, 4)
    path = write_tar(tmp_path / "a.tar", members_of(samples))
    files.pipe_file("/shards/a.tar", path.read_bytes())
    try:
        for source in ("memory://shards/a.tar", "memory://shards", "memory://shards/*.tar"):
            assert find_sources(source).names == ["a.tar"]
            assert open_dataset(source)[2] == samples[2]
    finally:
        files.rm("/shards", recursive=True)
