"""Rows of Parquet, Arrow and HuggingFace files, by number."""

from __future__ import annotations

import decimal
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.datasets.storage.web_server import WebServer, serve_ranges
from tests.new_process import interpreter
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow import DPFlowDataLoader
from torch_dpflow._core.threads import RunningLoads
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.disk_cache import DiskCache
from torch_dpflow.datasets.table_blocks import ArrowBlocks, ParquetBlocks
from torch_dpflow.datasets.tables import TableDataset, _OpenedTable
from torch_dpflow.errors import ChecksumError, OptionError, OptionTypeError, SourceError

ROWS = 100
BLOCK = 16


def rows(count: int = ROWS, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "number": n,
            "image": {"bytes": b"%d" % n * (n % 7), "path": f"{n}.jpg"},
            "caption": None if n % 5 else f"é{n}",
        }
        for n in range(first, first + count)
    ]


def write_parquet(path: Path, content: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(content), path, row_group_size=BLOCK, write_page_checksum=True)


def write_arrow(path: Path, content: list[dict[str, Any]], *, stream: bool = False) -> None:
    table = pa.Table.from_pylist(content)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=BLOCK)


def write_stream(path: Path, content: list[dict[str, Any]]) -> None:
    write_arrow(path, content, stream=True)


Write = Callable[[Path, list[dict[str, Any]]], None]
WRITERS = pytest.mark.parametrize(
    ("write", "ending"), [(write_parquet, ".parquet"), (write_arrow, ".arrow"), (write_stream, ".arrow")]
)


@WRITERS
def test_every_row_is_read_by_number_and_in_batches(tmp_path: Path, write: Write, ending: str) -> None:
    write(tmp_path / f"a{ending}", rows(60))
    write(tmp_path / f"b{ending}", rows(40, first=60))
    urls: list[Any] = [tmp_path, str(tmp_path), [tmp_path / f"a{ending}", f"file://{tmp_path}/b{ending}"]]
    for url in urls:
        table = TableDataset(url)
        assert len(table) == ROWS
        assert table.blocks.tolist() == [16, 16, 16, 12, 16, 16, 8]
        assert [table[n] for n in range(ROWS)] == rows()
        assert table[-1] == rows()[-1]
        order = np.random.default_rng(0).permutation(ROWS).tolist()
        assert table.__getitems__(order) == [rows()[n] for n in order]
        table.close()
        assert pickle.loads(pickle.dumps(table)).__getitems__([3, 99, 3]) == [rows()[n] for n in (3, 99, 3)]
        for wrong in (ROWS, -ROWS - 1):
            with pytest.raises(IndexError, match=f"row {wrong} is out of range; there are {ROWS}"):
                table[wrong]


def test_directories_of_huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread that stays
    written = datasets.Dataset.from_list(rows())
    written.save_to_disk(str(tmp_path / "one"), num_shards=3)
    table = TableDataset(tmp_path / "one")
    assert table.__getitems__(range(ROWS)) == [written[n] for n in range(ROWS)] == rows()
    # A selection is another order of the rows, which the files have.
    written.select(range(20, 0, -1)).save_to_disk(str(tmp_path / "selected"))
    assert [row["number"] for row in TableDataset(tmp_path / "selected").__getitems__(range(20))] == [*range(20, 0, -1)]
    datasets.DatasetDict({"train": written, "test": written}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(SourceError, match=r"has several datasets, \['test', 'train'\]; give one of them"):
        TableDataset(tmp_path / "both")
    assert len(TableDataset(tmp_path / "both" / "train")) == ROWS
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(SourceError, match=r"state.json names .*data-00001-of-00003.arrow.*not there"):
        TableDataset(tmp_path / "one")


def test_columns_and_decode(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows())
    table = TableDataset(tmp_path / "a.parquet", columns=["number"], decode=lambda row: row["number"] * 2)
    assert table.__getitems__([3, 4]) == [6, 8]
    with pytest.raises(SourceError, match=r"has no column \['nothing'\]; it has"):
        TableDataset(tmp_path / "a.parquet", columns=["nothing"])
    for columns, error in ((["number", "number"], OptionError), ([], OptionError), ("number", OptionTypeError)):
        with pytest.raises(error, match="columns="):
            TableDataset(tmp_path / "a.parquet", columns=columns)


def test_blocks_stay_within_the_memory(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows())
    table = TableDataset(tmp_path, memory="1B")
    for number in (0, 99, 0, 50):
        assert table[number] == rows()[number]
        assert len(table._opened.get()._blocks) == 1
    large = TableDataset(tmp_path)
    large.__getitems__(range(ROWS))
    assert len(large._opened.get()._blocks) == 7


def test_threads_that_miss_a_block_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", rows(BLOCK))
    table, joined, decoded = TableDataset(tmp_path), threading.Event(), list[int]()
    decode, start_or_join = _OpenedTable._decoded, RunningLoads.start_or_join

    def slow(opened: _OpenedTable, block: int) -> Any:
        decoded.append(block)
        assert joined.wait(150)
        if len(decoded) == 1:
            raise SourceError("damaged")
        return decode(opened, block)

    def start(running: RunningLoads, key: int) -> Any:
        found = start_or_join(running, key)
        if found[1]:
            joined.set()
        return found

    monkeypatch.setattr(_OpenedTable, "_decoded", slow)
    monkeypatch.setattr(RunningLoads, "start_or_join", start)
    with ThreadPoolExecutor(2) as threads:
        for outcome in (SourceError, rows(BLOCK)[3]):
            joined.clear()
            both = [threads.submit(table.__getitem__, 3) for _ in range(2)]
            found = [type(one.exception()) if one.exception() else one.result() for one in both]
            assert found == [outcome, outcome]
    assert decoded == [0, 0]
    table.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_it_in_a_global_order(tmp_path: Path, workers: int) -> None:
    write_parquet(tmp_path / "a.parquet", rows())
    table = TableDataset(tmp_path, columns=["number"])
    loader = DPFlowDataLoader(table, batch_size=10, shuffle=True, num_workers=workers)
    assert sorted(n for batch in loader for n in batch["number"].tolist()) == [*range(ROWS)]


@WRITERS
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
def test_cut_files_are_refused_by_name(tmp_path: Path, write: Write, ending: str, part: float) -> None:
    path = tmp_path / f"a{ending}"
    write(path, rows())
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    why = "Parquet (magic|file size)" if ending == ".parquet" else "it was cut short or is damaged"
    with pytest.raises(SourceError, match=rf"a{ending} cannot be read: {why}"):
        TableDataset(path).__getitems__(range(ROWS))


def test_a_stream_without_an_end_mark_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may have been cut, and a writer may end a stream by closing it."""
    table = pa.Table.from_pylist(rows())
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(0, BLOCK))
        cut = sink.getvalue()
        writer.write_table(table.slice(BLOCK))
    (tmp_path / "cut.arrow").write_bytes(cut)
    assert pa.ipc.open_stream(cut).read_all().num_rows == BLOCK
    with caplog.at_level("WARNING"):
        assert TableDataset(tmp_path / "cut.arrow").__getitems__(range(BLOCK)) == rows(BLOCK)
    assert "cut.arrow ends without an end-of-stream mark" in caplog.text


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no table", b"\x89PNG\r\n\x1a\n" * 50, os.urandom(4096)])
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_foreign_files_are_refused_by_name(tmp_path: Path, ending: str, content: bytes) -> None:
    (tmp_path / f"a{ending}").write_bytes(content)
    with pytest.raises(SourceError, match=rf"a{ending} cannot be read"):
        TableDataset(tmp_path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, rows())
    data = bytearray(path.read_bytes())
    data[len(data) // 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"a.parquet cannot be read"):
        TableDataset(path).__getitems__(range(ROWS))


def test_blocks_of_compressed_arrow_files_count_in_the_memory(tmp_path: Path) -> None:
    content = pa.table({"n": [*range(80_000)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), content.schema, options=options) as writer:
        writer.write_table(content, max_chunksize=10_000)
    table = TableDataset(tmp_path / "a.arrow", memory="64KiB")
    before = pa.total_allocated_bytes()
    assert [table[number]["n"] for number in range(0, 80_000, 10_000)] == [*range(0, 80_000, 10_000)]
    assert pa.total_allocated_bytes() - before < content.nbytes / 2


@WRITERS
def test_a_file_that_is_written_again_is_refused(tmp_path: Path, write: Write, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    write(path, rows())
    table = TableDataset(path, memory="1B")
    assert table[0] == rows()[0]
    beside = tmp_path / "beside"
    write(beside, rows(first=1000))
    beside.replace(path)
    with pytest.raises(ChecksumError, match=rf"a{ending} was written again after it was opened"):
        table[90]


@WRITERS
def test_a_file_that_is_written_in_place_during_a_read_is_refused(
    tmp_path: Path, write: Write, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / f"a{ending}", tmp_path / "other"
    write(path, [{"number": n} for n in range(ROWS)])
    write(other, [{"number": n} for n in range(1000, 1000 + ROWS)])
    table, kind = TableDataset(path), ParquetBlocks if ending == ".parquet" else ArrowBlocks
    read: Any = kind.read

    def read_later(blocks: Any, block: int, columns: Any) -> Any:
        with open(path, "r+b") as file:
            file.write(other.read_bytes()[: path.stat().st_size])
        return read(blocks, block, columns)

    monkeypatch.setattr(kind, "read", read_later)
    with pytest.raises((ChecksumError, SourceError), match=rf"a{ending}"):
        table[0]


@WRITERS
def test_joined_files_are_refused(tmp_path: Path, write: Write, ending: str) -> None:
    """Arrow reads a part of them."""
    for name, first in (("one", 0), ("two", 50)):
        write(tmp_path / name, rows(50, first=first))
    joined = tmp_path / f"joined{ending}"
    joined.write_bytes((tmp_path / "one").read_bytes() + (tmp_path / "two").read_bytes())
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/joined/joined{ending}", joined.read_bytes())
    for url in (joined, f"memory://joined/joined{ending}"):
        with pytest.raises(SourceError, match=rf"joined{ending} (cannot be read|has no footer of an Arrow file)"):
            TableDataset(url)
    memory.rm("/joined", recursive=True)


def test_a_mapped_file_that_is_changed_in_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, rows())
    table = TableDataset(path)
    assert table[0] == rows()[0]
    other = tmp_path / "other"
    write_arrow(other, rows(first=1))
    with open(path, "r+b") as file:
        file.write(other.read_bytes()[: path.stat().st_size])
    with pytest.raises(ChecksumError, match="written again"):
        table[0]
    os.truncate(path, 100)
    with pytest.raises(ChecksumError, match="written again"):
        table[0]


def test_types_of_columns_that_arrow_cannot_take_rows_from(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["a", "long enough to lie in a buffer", "c"], pa.string_view()),
            "data": pa.array([b"x", b"y" * 20, None], pa.binary_view()),
            "run": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["p", "q"])),
        }
    )
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert TableDataset(tmp_path / "a.arrow").__getitems__([2, 0, 1]) == [table.to_pylist()[n] for n in (2, 0, 1)]


def test_what_is_no_table_says_so(tmp_path: Path) -> None:
    for url, text in (
        (tmp_path / "a.parquet", "there is no .*a.parquet"),
        (tmp_path, "no Parquet or Arrow files"),
        ([], "give a path, a URL, a pattern"),
    ):
        with pytest.raises((SourceError, OptionTypeError), match=text):
            TableDataset(url)
    write_parquet(tmp_path / "a.parquet", rows())
    write_arrow(tmp_path / "b.arrow", rows())
    with pytest.raises(SourceError, match="both Parquet and Arrow"):
        TableDataset(tmp_path)
    (tmp_path / "b.arrow").unlink()
    pq.write_table(pa.table({"other": [1]}), tmp_path / "c.parquet")
    with pytest.raises(SourceError, match=r"c.parquet has the columns .*give files of one table"):
        TableDataset(tmp_path)
    (tmp_path / "c.parquet").unlink()
    (tmp_path / "year=2024").mkdir()
    with pytest.raises(SourceError, match="has directories, such as 'year=2024'"):
        TableDataset(tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_types_that_differ_between_files_are_joined(tmp_path: Path, ending: str) -> None:
    def write(name: str, **columns: Any) -> None:
        table, path = pa.table(columns), tmp_path / f"{name}.{ending}"
        if ending == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)

    write("0", n=pa.array([1, None], pa.int32()), f=pa.array([1.5, 2.5], pa.float32()), t=pa.array(["a", "b"]))
    write(
        "1", t=pa.array(["c"], pa.large_string()), n=pa.array([2**40]), f=pa.array([3], pa.int16())
    )  # in another order
    write("2", n=pa.nulls(1), f=pa.array([0.1]), t=pa.nulls(1))
    expected = [
        {"n": n, "f": f, "t": t} for n, f, t in ((1, 1.5, "a"), (None, 2.5, "b"), (2**40, 3.0, "c"), (None, 0.1, None))
    ]
    table = TableDataset(tmp_path)
    assert [table[number] for number in range(4)] == expected
    assert [type(table[number]["f"]) for number in range(4)] == [float] * 4
    assert pickle.loads(pickle.dumps(table)).__getitems__([2, 0]) == [expected[2], expected[0]]
    assert TableDataset(tmp_path, columns=["n"]).__getitems__([2]) == [{"n": 2**40}]
    write("3", n=pa.array(["text"]), f=pa.array([1.0]), t=pa.array(["d"]))
    with pytest.raises(SourceError, match=rf"3.{ending} has the columns .*give files of one table"):
        TableDataset(tmp_path)


@pytest.mark.parametrize(
    ("exact", "other"),
    [
        (pa.array([decimal.Decimal("0.10000000000000000001")]), pa.array([0.5])),
        (pa.array([decimal.Decimal("123456789.1")]), pa.array([0.5], pa.float32())),
        (pa.array(["text"]), pa.array([b"\xff"])),
        (pa.array(["text"], pa.large_string()), pa.array([b"\xff"])),
    ],
)
def test_columns_that_no_type_holds_without_a_loss_are_refused(tmp_path: Path, exact: Any, other: Any) -> None:
    for first, second in ((exact, other), (other, exact)):
        pq.write_table(pa.table({"a": first}), tmp_path / "0.parquet")
        pq.write_table(pa.table({"a": pa.nulls(1)}), tmp_path / "1.parquet")
        pq.write_table(pa.table({"a": second}), tmp_path / "2.parquet")
        with pytest.raises(SourceError, match=r"2.parquet has the columns .*'a' has no type for the values of both"):
            TableDataset(tmp_path)


_MANY = """
import pathlib, resource, sys
from torch_dpflow.datasets.table_blocks import ArrowBlocks, ParquetBlocks
from torch_dpflow.datasets.tables import TableDataset, _OpenedTable
count, limit = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
table = TableDataset(sys.argv[1], memory="1KiB")
assert len(table) == 2 * count
numbers = [number * 1999 % (2 * count) for number in range(300)]
assert [table[number]["n"] for number in numbers] == numbers
assert table.__getitems__(list(range(0, 2 * count, 8)))[-1] == {"n": 2 * count - 8}
assert len(list(pathlib.Path("/proc/self/fd").iterdir())) < 100
"""


@pytest.mark.parametrize(
    ("ending", "count", "limit"),
    [
        ("parquet", 400, 128),
        pytest.param("parquet", 2000, 256, marks=pytest.mark.slow),
        pytest.param("arrow", 2000, 256, marks=pytest.mark.slow),
        pytest.param("stream", 2000, 256, marks=pytest.mark.slow),
    ],
)
def test_many_files_need_few_descriptors(tmp_path: Path, ending: str, count: int, limit: int) -> None:
    for number in range(count):
        table = pa.table({"n": [2 * number, 2 * number + 1]})
        path = tmp_path / f"{number:04d}.{'parquet' if ending == 'parquet' else 'arrow'}"
        if ending == "parquet":
            pq.write_table(table, path)
        else:
            with (pa.ipc.new_file if ending == "arrow" else pa.ipc.new_stream)(str(path), table.schema) as writer:
                writer.write_table(table)
    with interpreter(_MANY, str(tmp_path), str(count), str(limit)) as process:
        assert process.communicate(timeout=250)[1] == ""
    assert process.returncode == 0


class Counting(MemoryFileSystem):
    """Counts the bytes that are read."""

    protocol = "counting"
    cachable = False
    count = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("counting://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data = super().cat_file(path, start, end, **kwargs)
        Counting.count += len(data)
        return data


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_of_a_remote_arrow_file_are_counted_without_reading_it(compression: str | None) -> None:
    fsspec.register_implementation("counting", Counting, clobber=True)
    content = pa.table({"n": [*range(40)], "data": [os.urandom(100_000) for _ in range(40)]})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, content.schema, options=options) as writer:
        for first in range(0, 40, 3):
            writer.write_table(content.slice(first, 3))
    MemoryFileSystem().pipe_file("/counted/a.arrow", sink.getvalue().to_pybytes())
    try:
        Counting.count = 0
        table = TableDataset("counting://counted/a.arrow")
        assert table.blocks.tolist() == [3] * 13 + [1]
        assert Counting.count < 200_000
        Counting.count = 0
        assert pickle.loads(pickle.dumps(table))[31] == content.slice(31, 1).to_pylist()[0]
        assert Counting.count < 500_000  # of 4 MB: the batch, and a footer
        for damaged in (b"", b"ARROW1", sink.getvalue().to_pybytes()[:-3], os.urandom(1000) + b"\x10\0\0\0ARROW1"):
            MemoryFileSystem().pipe_file("/counted/b.arrow", damaged)
            with pytest.raises(SourceError, match=r"b\.arrow"):
                TableDataset("counting://counted/b.arrow")
    finally:
        MemoryFileSystem().rm("/counted", recursive=True)


def _put(oss: OSSServer, data: bytes, age_s: float) -> None:
    modified = datetime.now(timezone.utc) - timedelta(seconds=age_s)
    oss.buckets.put("tables", "x/a.parquet", StoredObject(data=data, content_type="binary", modified=modified))


@pytest.fixture
def remote(s3_endpoint: str, oss: OSSServer, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A Parquet file of 100 rows on OSS; after the S3 server, which has fsspec's thread started once for all."""
    oss.buckets.create("tables")
    write_parquet(tmp_path / "a.parquet", rows())
    _put(oss, (tmp_path / "a.parquet").read_bytes(), age_s=1000)
    yield "oss://tables/x/a.parquet", oss.storage_options()
    files = fsspec.filesystem("oss", **oss.storage_options())
    files._session.session.close()
    type(files).clear_instance_cache()


def test_decoded_blocks_stay_on_the_disk(remote: Any, oss: OSSServer, tmp_path: Path) -> None:
    url, options = remote
    read_options = ReadOptions(cache_dir=tmp_path / "cache", deadline_s=1.0)
    order = np.random.default_rng(0).permutation(ROWS).tolist()
    table = TableDataset(url, storage_options=options, read_options=read_options, memory="1B")
    assert table.__getitems__(order) == [rows()[n] for n in order]
    table.close()
    requests = len(oss.requests)
    assert table.__getitems__(order[::-1]) == [rows()[n] for n in order[::-1]]
    assert len(oss.requests) == requests
    assert DiskCache(str(tmp_path / "cache")).usage().entries >= 7
    _put(oss, (tmp_path / "a.parquet").read_bytes()[::-1], age_s=500)
    with pytest.raises(SourceError):  # another object has entries of its own
        TableDataset(url, storage_options=options, read_options=read_options)


def test_decoded_blocks_of_two_endpoints_do_not_mix(s3_endpoint: str, tmp_path: Path) -> None:
    """Their objects have the same URL, size and modification time."""
    modified = datetime.now(timezone.utc) - timedelta(seconds=1000)
    with OSSServer() as one, OSSServer() as other:
        for server, first in ((one, 0), (other, 1000)):
            path = tmp_path / f"{first}.parquet"
            pq.write_table(pa.table({"n": range(first, first + ROWS)}), path, compression="none", use_dictionary=False)
            server.buckets.create("tables")
            stored = StoredObject(data=path.read_bytes(), content_type="binary", modified=modified)
            server.buckets.put("tables", "x/a.parquet", stored)
            for _ in range(2):
                table = TableDataset(
                    "oss://tables/x",
                    storage_options=server.storage_options(),
                    read_options=ReadOptions(cache_dir=tmp_path / "cache"),
                )
                assert [row["n"] for row in table.__getitems__(range(ROWS))] == [*range(first, first + ROWS)]
                table.close()
            files = fsspec.filesystem("oss", **server.storage_options())
            files._session.session.close()
            type(files).clear_instance_cache()
    assert (tmp_path / "0.parquet").stat().st_size == (tmp_path / "1000.parquet").stat().st_size
    assert DiskCache(str(tmp_path / "cache")).usage().entries >= 2


def test_decoded_blocks_are_found_under_a_renewed_signature(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows())
    entries = []
    with WebServer(serve_ranges((tmp_path / "a.parquet").read_bytes(), ETag='"1"')) as web:
        for query in ("sv=1&sig=SECRET1&v=3", "sv=1&sig=SECRET2&v=3", "sv=1&sig=SECRET2&v=4"):
            table = TableDataset(f"{web.url}/a.parquet?{query}", read_options=ReadOptions(cache_dir=tmp_path / "cache"))
            assert table.__getitems__(range(ROWS)) == rows()
            table.close()
            entries.append(DiskCache(str(tmp_path / "cache")).usage().entries)
    assert entries[0] == entries[1] == entries[2] / 2  # another query names another object


def test_an_object_that_is_not_a_minute_old_is_not_kept(remote: Any, oss: OSSServer, tmp_path: Path) -> None:
    """The modification time in a listing has a resolution of a second: it may be written again in that second."""
    url, options = remote
    _put(oss, (tmp_path / "a.parquet").read_bytes(), age_s=0)
    folder = url.rpartition("/")[0]
    table = TableDataset(folder, storage_options=options, read_options=ReadOptions(cache_dir=tmp_path / "cache"))
    assert table.__getitems__(range(ROWS)) == rows()
    table.close()
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not files or DiskCache(str(tmp_path / "cache")).usage().entries == 0


def test_an_object_that_is_written_again_is_refused(remote: Any, oss: OSSServer, tmp_path: Path) -> None:
    url, options = remote
    table = TableDataset(url, storage_options=options, memory="1B")
    assert table[0] == rows()[0]
    write_parquet(tmp_path / "b.parquet", rows(first=1000))
    _put(oss, (tmp_path / "b.parquet").read_bytes(), age_s=0)
    with pytest.raises(ChecksumError, match="oss://tables/x/a"):
        table.__getitems__(range(ROWS))
    table.close()


def test_tensors_of_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1.5, 2.5]] * 8, "y": list(range(8))}), tmp_path / "a.parquet")
    (batch,) = DPFlowDataLoader(TableDataset(tmp_path), batch_size=8)
    assert torch.equal(batch["y"], torch.arange(8))
