"""Rows of samples: what was written comes back, damage is noticed, and processes of a host share what one has read."""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import random
import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.formats.tars import write_shards
from tests.datasets.samples_source import Numbered, numbers, publish
from tests.new_process import run_interpreter
from torch_dpflow.datasets import DatasetStore, open_dataset
from torch_dpflow.datasets.index import PartRows, Rows
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.storage import ByteRange
from torch_dpflow.errors import DamagedStoreError, DPFlowError

NAMES = st.text("ab%\u00e9 \U0001f600", min_size=1, max_size=4)


@st.composite
def a_sample(draw: Any) -> SampleMeta:
    offset = draw(st.none() | st.integers(0, 2**62))
    length = draw(st.integers(0, 2**62)) if offset is not None else draw(st.none() | st.integers(0, 2**62))
    checksum = draw(st.sampled_from([None, "crc32:0123abcd", f"sha256:{64 * '0'}"]))
    state = draw(st.sampled_from([None, '"etag"', "1 2 3"]))
    meta = msgspec.Raw(msgspec.json.encode(draw(st.dictionaries(NAMES, st.integers(), max_size=3))))
    path = f"memory://root/{draw(NAMES)}"
    return SampleMeta(path=path, offset=offset, length=length, checksum=checksum, revision=state, meta=meta)


def rows_of(
    parts: Sequence[Sequence[SampleMeta]], data: bytes | None = None, load: Any = None, size: int | None = None
) -> Rows:
    encoded = [PartRows(size).add(part).encoded() for part in parts]
    content = b"".join(encoded) if data is None else data
    mapped = mmap.mmap(-1, max(1, len(content)))
    mapped[: len(content)] = content
    firsts = [0, *accumulate(map(len, parts))]
    return Rows(mapped, firsts, [0, *accumulate(map(len, encoded))], "memory://root", {}, load)


def place_of(sample: SampleMeta, size: int | None, *, is_checked: bool) -> tuple[ByteRange, bytes]:
    state, checksum, size = (sample.revision, sample.checksum, size) if is_checked else (None, None, None)
    if sample.offset is None or sample.length is None:
        return ByteRange(sample.path, size=sample.length, state=state, checksum=checksum), bytes(sample.meta)
    stop = sample.offset + sample.length
    return ByteRange(sample.path, sample.offset, stop, size, state, checksum), bytes(sample.meta)


@given(st.lists(st.lists(a_sample(), max_size=4), min_size=1, max_size=5), st.none() | st.integers(0, 2**62))
def test_rows_give_back_samples(parts: list[list[SampleMeta]], size: int | None) -> None:
    rows = rows_of(parts, size=size)
    samples = [one for part in parts for one in part]
    for is_checked in (True, False):
        found = rows.places(range(len(samples)), is_checked=is_checked)
        assert found == [place_of(one, size, is_checked=is_checked) for one in samples]
    assert rows.lengths().tolist() == [-1 if one.length is None else one.length for one in samples]


@given(st.lists(a_sample(), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_is_noticed_by_its_samples(samples: list[SampleMeta], at: int, flip: int) -> None:
    content = bytearray(PartRows().add(samples).encoded())
    content[at % len(content)] ^= flip
    error = DamagedStoreError("for all")
    rows = rows_of([samples], bytes(content), lambda parts: dict.fromkeys(parts, error))
    found = [place if isinstance(place, DPFlowError) else place[1] for place in rows.places(range(len(samples)))]
    assert found != [bytes(one.meta) for one in samples]
    assert all(place is error or place == bytes(one.meta) for place, one in zip(found, samples))


@given(st.lists(a_sample(), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(1, 100))
def test_a_part_that_another_process_is_writing_is_read_once_it_is_there(
    samples: list[SampleMeta], at: int, size: int
) -> None:
    whole = PartRows().add(samples).encoded()
    begun = bytearray(whole)
    hole = slice(at % len(whole), at % len(whole) + size)
    begun[hole] = bytes(len(begun[hole]))

    def load(parts: Sequence[int]) -> dict[int, DPFlowError]:
        rows._data[: len(whole)] = whole
        return {}

    rows = rows_of([samples], bytes(begun), load)
    assert rows.places(range(len(samples))) == [place_of(one, None, is_checked=True) for one in samples]


def test_a_path_that_leads_out_of_its_root_is_the_error_of_its_sample() -> None:
    meta = msgspec.Raw(b"{}")
    good, bad = (SampleMeta(path=path, meta=meta) for path in ("a", "../b"))
    first, second = rows_of([[good, bad]]).places([0, 1])
    assert isinstance(first, tuple)
    assert isinstance(second, DamagedStoreError)


def read_in_order(reader: DatasetReader, reads: list[int], expected: Any, shards: int) -> None:
    first = [reader[index] for index in range(400)] == expected
    again = reader.__getitems__([*range(400)]) == expected
    os._exit(0 if first and again and len(reads) == shards else 1)


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "memory"])
def test_what_a_forked_child_has_read_its_parent_need_not_read(
    tmp_path: Path, local_store: DatasetStore, metadata_reads: list[int], monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    (tmp_path / "none").touch()
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(tmp_path / ("index" if is_file else "none")))
    stored = publish(local_store, Numbered(400), shard_size=40)
    reader, expected = DatasetReader(stored), numbers(400)
    child = os.fork()
    if child == 0:
        read_in_order(reader, metadata_reads, expected, 10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    order = random.Random(0).sample(range(400), 400)
    assert reader.__getitems__(order) == [expected[index] for index in order]
    assert not metadata_reads
    reader.close()


def test_a_process_that_was_started_alone_shares_them_too(
    tmp_path: Path, local_store: DatasetStore, monkeypatch: pytest.MonkeyPatch, metadata_reads: list[int]
) -> None:
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(tmp_path / "index"))
    reader = DatasetReader(publish(local_store, Numbered(40), shard_size=4))
    pickled = tmp_path / "pickled"
    pickled.write_bytes(pickle.dumps(reader))
    script = f"import pickle; pickle.loads(open({str(pickled)!r}, 'rb').read()).__getitems__(range(40))"
    done = run_interpreter(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert reader.__getitems__([*range(40)]) == numbers(40)
    assert not metadata_reads


def test_damage_of_the_file_is_read_again(
    tmp_path: Path, local_store: DatasetStore, monkeypatch: pytest.MonkeyPatch, metadata_reads: list[int]
) -> None:
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(tmp_path / "index"))
    stored = publish(local_store, Numbered(40), shard_size=4)
    assert DatasetReader(stored).__getitems__([*range(40)]) == numbers(40)
    (file,) = tmp_path.glob("index/stored/*")
    content = bytearray(file.read_bytes())
    content[: len(content) // 2] = random.Random(0).randbytes(len(content) // 2)
    file.write_bytes(content)
    del metadata_reads[:]
    assert DatasetReader(stored).__getitems__([*range(40)]) == numbers(40)
    assert 4 <= len(metadata_reads) <= 6


def test_several_processes_fill_one_file(tmp_path: Path, local_store: DatasetStore, monkeypatch: Any) -> None:
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(tmp_path / "index"))
    stored = publish(local_store, Numbered(400), shard_size=4)
    expected = functools.partial(numbers, 400)
    children = []
    for seed in range(3):
        child = os.fork()
        if child == 0:
            order = random.Random(seed).sample(range(400), 400)
            found = DatasetReader(stored).__getitems__(order)
            os._exit(0 if found == [expected()[index] for index in order] else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]


def test_indexes_and_rows_where_the_environment_names_an_object_store(
    tmp_path: Path, local_store: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared parts go there, and what is mapped below the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}"
    monkeypatch.setenv("DPFLOW_INDEX_DIR", url)
    samples = write_shards(tmp_path / "data", 2, 5)
    reader = DatasetReader(publish(local_store, Numbered(40), shard_size=4))
    try:
        for _ in range(2):
            dataset: Any = open_dataset(tmp_path / "data")
            assert dataset.__getitems__(range(10)) == samples
            assert pickle.loads(pickle.dumps(dataset))[9] == samples[9]
            shutil.rmtree(tmp_path / "cache" / "torch_dpflow" / "index" / "copies")
        assert reader[39] == numbers(40)[39]
        found = sorted(path.split("/")[2] for path in fsspec.filesystem("memory").find(f"/{tmp_path.name}"))
        assert found == ["joined", "parts", "parts"]
    finally:
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    assert [path.name for path in (tmp_path / "cache" / "torch_dpflow" / "index").iterdir()] == ["stored"]
