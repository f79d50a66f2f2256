"""`open_dataset`: damaged indexes, directories that cannot be written, and arguments that it does not have."""

from __future__ import annotations

import gzip
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.formats.tars import write_shards
from tests.datasets.formats.test_packed import COUNT, assert_equal, mds_expected, write_mds
from tests.new_process import in_fork
from torch_dpflow.datasets import DatasetStore, open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.index_builder import _Builder
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.errors import DamagedStoreError, DPFlowError, OptionError, OptionTypeError, StorageError


def _flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize("count", [1, 8, 24])
def test_all_damaged_parts_are_written_in_one_opening(
    tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As a power loss leaves them: empty, cut, missing, or with other bytes."""
    samples = write_shards(tmp_path / "data", 24, 2)
    open_dataset(tmp_path / "data")
    parts = sorted(index_dir.glob("parts/*/*"))
    assert len(parts) == 24
    (joined,) = index_dir.glob("joined/*")
    joined.write_bytes(b"")
    changes = [lambda data: b"", lambda data: data[:9], None, _flipped]
    for number, part in enumerate(parts[:count]):
        change = changes[number % len(changes)]
        part.write_bytes(change(part.read_bytes())) if change else part.unlink()
    names: list[str] = []
    write = _Builder._write_part
    monkeypatch.setattr(_Builder, "_write_part", lambda self, key, *how: names.append(key) or write(self, key, *how))
    assert open_dataset(tmp_path / "data").__getitems__(range(48)) == samples
    assert sorted(names) == [part.name for part in parts[:count]]


@pytest.mark.parametrize("kind", ["joined/*", "parts/*/*"])
def test_no_sample_is_lost_by_a_damaged_count(tmp_path: Path, index_dir: Path, kind: str) -> None:
    """Positions and counts at the begin of a file of the index are covered by its checksum too."""
    samples = write_shards(tmp_path / "data", 3, 2)
    open_dataset(tmp_path / "data")
    (joined,), damaged = index_dir.glob("joined/*"), min(index_dir.glob(kind))
    for bit in range(320 if kind == "joined/*" else 96):
        data = bytearray(damaged.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        joined.unlink()
        damaged.write_bytes(data)
        assert open_dataset(tmp_path / "data").__getitems__([*range(6)]) == samples, bit
        assert len(open_dataset(tmp_path / "data")) == 6, bit


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize(
    "change",
    [lambda data: data[:100], lambda data: b"", lambda data: None, _flipped],
    ids=["cut", "empty", "missing", "flipped"],
)
def test_copies_of_compressed_samples_are_written_again(tmp_path: Path, change: Any, place: str) -> None:
    write_mds(tmp_path / "data", "gz", gzip.compress)
    index_dir = f"memory://{tmp_path.name}" if place == "memory" else str(tmp_path / "index")
    once = ReadOptions(attempts=1)
    dataset = open_dataset(tmp_path / "data", index_dir=index_dir, read_options=once)
    files = Files(index_dir)
    (folder,) = files.children("packs")
    packs = [f"packs/{folder.name}/{child.name}/pack-0-0.bin" for child in files.children(f"packs/{folder.name}")]
    whole = {pack: files.read(pack) for pack in packs}
    numbers = range(COUNT)
    assert not [one for one in dataset.read_each(numbers) if isinstance(one, DPFlowError)]
    for pack in packs[:2]:
        changed = change(whole[pack])
        files.remove(pack) if changed is None else files.write(pack, changed)
    found = dataset.read_each(numbers)
    lost = [one for one in found if isinstance(one, DPFlowError)]
    assert lost
    assert len(lost) < COUNT  # of the third pack none
    for error in lost:
        assert isinstance(error, DamagedStoreError)
        assert "open the data again, which builds it again" in str(error)
    again = open_dataset(tmp_path / "data", index_dir=index_dir)
    for number, sample in zip(numbers, again.__getitems__(numbers), strict=True):
        assert_equal(sample, mds_expected(number))
    assert {pack: files.read(pack) for pack in packs} == whole
    assert not [one for one in dataset.read_each(numbers) if isinstance(one, DPFlowError)]  # what was open goes on
    files.remove("")


def test_a_directory_that_loses_what_is_written_is_named(
    tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "data", 9, 1)
    put = _Builder._put
    monkeypatch.setattr(_Builder, "_put", lambda self, path, content: put(self, path, content[:9]))
    with pytest.raises(DamagedStoreError, match=rf"{index_dir} loses what is written there; give another index_dir="):
        open_dataset(tmp_path / "data")


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/x", "/proc/x/y", "/sys/x", "/dev/null"])
def test_a_directory_of_indexes_that_cannot_be_written(tmp_path: Path, folder: str) -> None:
    write_shards(tmp_path / "data", 1, 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="give index_dir=, or set DPFLOW_INDEX_DIR") as failed:
        open_dataset(tmp_path / "data", index_dir=tmp_path / folder)
    assert folder in str(failed.value)


def test_a_disk_without_room_for_an_index_is_named(tmp_path: Path) -> None:
    in_fork(open_without_room, tmp_path)


def open_without_room(folder: Path) -> None:
    """Open with a limit of files' sizes, which fails as a full disk does: while the file is written."""
    write_shards(folder / "data", 1, 500)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    expected = f"File too large; indexes are written to file://{folder}/indexes: give index_dir="
    with pytest.raises(StorageError, match=expected):
        open_dataset(folder / "data", index_dir=folder / "indexes")


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    samples = write_shards(tmp_path / "data", 1, 5)
    dataset = open_dataset(tmp_path / "data", read_options=ReadOptions(cache_dir="/proc/x"))
    assert dataset.__getitems__(range(5)) == samples


@pytest.mark.parametrize(
    ("given_arguments", "message"),
    [
        ({"shuffle": True}, r"open_dataset\(\) has no shuffle=True; .*DPFlowDataLoader\(dataset, shuffle=True\)"),
        ({"batch_size": 4, "num_workers": 2}, r"DPFlowDataLoader\(dataset, batch_size=4, num_workers=2\)"),
        ({"drop_last": True, "collate_fn": list, "sampler": None}, r"DPFlowDataLoader\(dataset, drop_last=True, "),
        ({"main": "jpg"}, r"has no main='jpg'; give source, format, .*, read_options, check, .* in settings="),
        ({"given_urls": {}}, r"has no given_urls=\{\}; give source, "),
        ({"transform": 1, "shuffle": True}, r"has no transform=1, shuffle=True; give source, "),
    ],
)
@pytest.mark.parametrize("source", ["shards", "core/x:v1:train", "a.parquet"])
def test_arguments_of_others_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, given_arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionTypeError, match=message):  # before anything is looked up
        open_dataset(source, **given_arguments)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"checksum": "md5"}, OptionError, "checksum='md5': give one of"),
        ({"index_dir": 3}, OptionTypeError, "index_dir=3 is of type int; give a path or URL"),
        ({"progress": 3}, OptionTypeError, "progress=3 is of type int; give a function"),
        ({"storage_options": [1]}, OptionTypeError, "give a dict of fsspec's options"),
        ({"storage_options": ()}, OptionTypeError, "give a dict of fsspec's options"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(
    tmp_path: Path, index_dir: Path, given: dict[str, Any], kind: Any, message: str
) -> None:
    write_shards(tmp_path / "data", 1, 2)
    with pytest.raises(kind, match=message):
        open_dataset(tmp_path / "data", **given)
    assert not index_dir.exists()


@pytest.mark.parametrize("place", [None, 3, b"data", ["data"]])
def test_what_is_no_path_makes_no_directory_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    """As a variable of the environment that is not set."""
    monkeypatch.chdir(tmp_path)
    for use in (Files, DatasetStore, DatasetStore.create):
        with pytest.raises(OptionTypeError, match=r"url=.* is of type \w+; give a path or URL"):
            use(place)
    assert not [*tmp_path.iterdir()]
