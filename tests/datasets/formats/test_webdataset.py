"""Tar shards of WebDataset are read in place: every sample is equal, and what cannot be read is refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import socket
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.datasets.formats.tars import members_of, samples_of, write_shards, write_tar
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.importers.webdataset import WebDatasetImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.errors import ChecksumError, SourceError

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
MEMBERS = [("a.jpg", b"one" * 300), ("a.cls", b"1"), ("b.jpg", b"two" * 400), ("b.cls", b"2")]
SIZES = st.integers(0, 1600)


def test_samples_are_dicts_of_every_members_bytes(tmp_path: Path) -> None:
    samples = write_shards(tmp_path / "data", 3, 40)
    dataset = open_dataset(f"{tmp_path}/data/train-{{000..002}}.tar")
    assert [dataset[number] for number in range(120)] == samples
    assert dataset.__getitems__([119, 0, 60, -1]) == [samples[119], samples[0], samples[60], samples[119]]
    raw, annotations = DatasetReader(dataset.stored)[7]
    assert raw == samples[7]["jpg"]
    assert annotations["cls"] == "7"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves files to be collected
def test_samples_equal_those_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for sample in samples_of(shard * 30, 30):
                writer.write({**sample, "meta.json": {"shard": shard, "text": "x" * 400 * shard}})
    pattern = str(tmp_path / "{0..1}.tar")
    theirs = [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(pattern, shardshuffle=False)
    ]
    dataset = open_dataset(pattern)
    assert len(theirs) == 60
    assert [dataset[number] for number in range(60)] == theirs


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="./\0", exclude_categories=("Cs",)), min_size=1, max_size=90),
        st.tuples(SIZES, SIZES, st.sampled_from([20, 90, 180])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_names_of_any_length_and_script(
    tmp_path_factory: pytest.TempPathFactory,
    shape: dict[str, tuple[int, int, int]],
    format: int,
) -> None:
    folder = tmp_path_factory.mktemp("tar")
    samples = [
        {"__key__": f"{'d' * depth}/{name}", "bin": bytes([number]) * one, "x.y": b"\xff" * other}
        for number, (name, (one, other, depth)) in enumerate(shape.items())
    ]
    path = write_tar(folder / "a.tar", members_of(samples), format)
    dataset = open_dataset(path, index_dir=folder / "index")
    assert [dataset[number] for number in range(len(samples))] == samples


@pytest.mark.parametrize("format", FORMATS)
def test_directories_hidden_members_and_metadata_are_no_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: int
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as archive:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("__info__", "d/._a.jpg", "d/README", "d/a.JPG", "d/a.Cls"):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    dataset = open_dataset(path)
    assert [dataset[0]] == [{"__key__": "d/a", "jpg": b"abc", "cls": b"abc"}]
    assert len(dataset) == 1
    assert "2 members, such as d/._a.jpg, are links, hidden or without an ending" in caplog.text


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6", b"V"])
def test_members_without_bytes_belong_to_no_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: bytes
) -> None:
    """As in webdataset: links, devices, pipes and the label of a volume."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, of in (("a.jpg", tarfile.REGTYPE), ("b.jpg", kind), ("c.jpg", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = of, 3 if of == tarfile.REGTYPE else 0, "a.jpg"
            archive.addfile(info, io.BytesIO(b"abc"))
    dataset = open_dataset(tmp_path / "a.tar")
    assert [dataset[number]["__key__"] for number in range(len(dataset))] == ["a", "c"]
    assert "1 members, such as b.jpg, are links" in caplog.text


@pytest.mark.parametrize("blocks", [20, 4096, 20_000])
def test_any_number_of_zeros_may_fill_the_last_record(tmp_path: Path, blocks: int) -> None:
    path = write_tar(tmp_path / "a.tar", MEMBERS)
    data = path.read_bytes()
    path.write_bytes(data + bytes(-len(data) % (512 * blocks)))
    assert len(open_dataset(path)) == 2
    path.write_bytes(data + bytes(512 * blocks) + data)
    with pytest.raises(SourceError, match=r"a\.tar goes on after its end-of-archive block"):
        open_dataset(path)


def test_what_lies_beside_shards_is_no_shard(tmp_path: Path) -> None:
    samples = write_shards(tmp_path / "data", 2, 3)
    for name in ("train-000.tar.md5", "train-000.tar.sha256", "train-000.tar.idx", "README"):
        (tmp_path / "data" / name).write_text("0 train")
    (tmp_path / "data" / "latest").symlink_to("gone")
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "data" / "control.sock"))
        assert open_dataset(tmp_path / "data").__getitems__(range(6)) == samples
    (tmp_path / "data" / "train-002.tar").symlink_to("gone")
    with pytest.raises(SourceError, match=r"train-002\.tar is no regular file, or a link that leads nowhere"):
        open_dataset(tmp_path / "data")


def test_the_main_member_can_be_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", MEMBERS)
    dataset = open_dataset(path, settings={"main": "cls"})
    assert DatasetReader(dataset.stored)[1][0] == b"2"
    assert dataset[1] == {"__key__": "b", "jpg": b"two" * 400, "cls": b"2"}
    with pytest.raises(SourceError, match=r"sample a has no member 'png'; it has \['jpg', 'cls'\]"):
        open_dataset(path, settings={"main": "png"})


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_above_8_gib(tmp_path: Path, format: int) -> None:
    path = tmp_path / "large.tar"
    size = 9 * 2**30 + 1
    with path.open("wb") as file:
        info = tarfile.TarInfo("a.bin")
        info.size = size
        file.write(info.tobuf(format))
        file.seek(-(-size // 512) * 512, 1)
        after = tarfile.TarInfo("b.bin")
        after.size = 5
        file.write(after.tobuf(format) + b"after".ljust(512, b"\0") + bytes(1024))
    dataset = open_dataset(path)
    assert dataset[1] == {"__key__": "b", "bin": b"after"}
    assert dataset.stored.open_rows().lengths()[0] == size


def _sparse(path: Path) -> None:
    header = bytearray(tarfile.TarInfo("holes.bin").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(header + bytes(1024))


def _pax_sparse(path: Path) -> None:
    info = tarfile.TarInfo("holes.bin")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "holes.bin"}
    path.write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


def _lost_name(format: int) -> Callable[[Path], None]:
    """Write an archive in which zeros replace a name that is not in the header."""

    def write(path: Path) -> None:
        with tarfile.open(path, "w", format=format) as tar:
            tar.addfile(tarfile.TarInfo("größe" * 40 + ".jpg"))
        data = path.read_bytes()
        path.write_bytes(data[:512] + bytes(512) + data[1024:])

    return write


def _altered(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tar(path, MEMBERS)
        path.write_bytes(change(path.read_bytes()))

    return write


def _end(data: bytes) -> int:
    """Return where the end-of-archive blocks begin."""
    return -(-len(data.rstrip(b"\0")) // 512) * 512


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gzip": (_altered(gzip.compress), "is compressed with gzip.*gunzip"),
    "xz": (_altered(lzma.compress), "is compressed with xz"),
    "bzip2": (_altered(bz2.compress), "is compressed with bzip2"),
    "foreign": (lambda path: path.write_bytes(b"\x89PNG" * 400), "is no tar archive: it begins with"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "sparse": (_sparse, "holes.bin is a sparse file"),
    "sparse PAX": (_pax_sparse, "holes.bin is a sparse file"),
    "a long name of zeros": (_lost_name(tarfile.GNU_FORMAT), "damaged: it has a member without a name, at byte 1024"),
    "a PAX header of zeros": (_lost_name(tarfile.PAX_FORMAT), "damaged: it has a PAX header that is malformed"),
    "twice": (lambda path: write_tar(path, [*MEMBERS, MEMBERS[-1]]), "sample b has two members 'cls'"),
    "apart": (lambda path: write_tar(path, [*MEMBERS, ("a.txt", b"")]), "members of a are not next to each other"),
    "joined": (_altered(lambda data: data + data), "goes on after its end-of-archive block"),
    "no end": (_altered(lambda data: data[: _end(data)]), "no end-of-archive block"),
    "cut in a header": (_altered(lambda data: data[:1700]), "cut short"),
    "cut in a member": (_altered(lambda data: data[:700]), "cut short"),
    "damaged header": (_altered(lambda data: data[:1540] + b"!" + data[1541:]), "damaged"),
    "nothing": (lambda path: write_tar(path, []), r"there is nothing to import from [^ =]*bad\.tar: it has no samples"),
    "a key": (lambda path: write_tar(path, [*MEMBERS, ("c.__key__", b"")]), "sample c has a member '__key__'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write, message = REFUSED[kind]
    path = tmp_path / "bad.tar"
    write(path)
    with pytest.raises(SourceError, match=message) as refused:
        open_dataset(path)
    assert "bad.tar" in str(refused.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5119))
def test_no_cut_loses_a_sample_silently(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = write_tar(folder / "whole.tar", MEMBERS).read_bytes()
    cut = folder / "cut.tar"
    cut.write_bytes(whole[:length])
    if length < _end(whole) + 512:
        with pytest.raises(SourceError, match=r"cut\.tar"):
            open_dataset(cut, index_dir=folder / "index")
    else:
        assert len(open_dataset(cut, index_dir=folder / "index")) == 2


def test_a_shard_cut_after_it_was_indexed_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", MEMBERS)
    dataset = open_dataset(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ChecksumError, match=r"a\.tar"):
        dataset[0]


def test_a_store_imports_the_same_samples(tmp_path: Path, local_store: DatasetStore) -> None:
    samples = write_shards(tmp_path / "data", 2, 20)
    draft = Draft(local_store, "core/w", "v1")
    draft.add("train", WebDatasetImporter(tmp_path / "data"))
    draft.publish()
    dataset = open_dataset("core/w:v1:train", store=local_store)
    assert [dataset[number] for number in range(40)] == samples


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_small_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import time

    path = tmp_path / "many.tar"
    info = tarfile.TarInfo()
    with path.open("wb", 1 << 20) as file:
        for number in range(500_000):
            for ending, content in (("bin", b"%07d" % number), ("cls", b"3")):
                info.name, info.size = f"{number:07d}.{ending}", len(content)
                file.write(info.tobuf(tarfile.USTAR_FORMAT) + content.ljust(512, b"\0"))
        file.write(bytes(1024))
    began = time.perf_counter()
    dataset = open_dataset(path)
    with capsys.disabled():
        print(f"\nindexed a million members in {time.perf_counter() - began:.1f} s")
    assert len(dataset) == 500_000
    for number in (0, 123_456, 499_999):
        assert dataset[number] == {"__key__": f"{number:07d}", "bin": b"%07d" % number, "cls": b"3"}
