"""Batches overlap, neighbouring ranges come together, and readers survive forks and pickles."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.datasets.storage.servers import BUCKET
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import ObjectState
from torch_dpflow.datasets.storage.batch_reads import Overlap
from torch_dpflow.errors import ObjectMissingError, OptionError, TruncatedObjectError

COUNT = 24


@pytest.fixture
def server(oss: OSSServer) -> OSSServer:
    for number in range(COUNT):
        oss.buckets.put(BUCKET, f"{number}", StoredObject(data=bytes([number]) * 3000, content_type="x"))
    return oss


@pytest.fixture
def reader(server: OSSServer) -> Iterator[ObjectReader]:
    options = ReadOptions(concurrency=8, backoff_s=0.01)
    with ObjectReader(server.storage_options(), options=options) as reader:
        yield reader


def url(number: int) -> str:
    return f"oss://{BUCKET}/{number}"


def wholes(*numbers: int) -> list[ByteRange]:
    return [ByteRange(url(number)) for number in numbers]


def test_a_batch_comes_in_its_order(reader: ObjectReader) -> None:
    order = [*range(COUNT)][::-1]
    assert [data[0] for data in reader.read_many(wholes(*order))] == order


def test_reads_of_a_batch_overlap_up_to_the_limit(server: OSSServer, reader: ObjectReader) -> None:
    server.latency_s = 0.2  # so that each of its threads gets something
    reader.read_many(wholes(*range(COUNT)))
    assert server.connections == 8


def test_a_batch_of_nothing_is_nothing(server: OSSServer, reader: ObjectReader) -> None:
    assert reader.read_many([]) == []
    assert reader.read_many([ByteRange(url(99), 5, 5)]) == [b""]
    assert server.requests == []


def test_the_first_error_is_raised(reader: ObjectReader) -> None:
    with pytest.raises(ObjectMissingError, match="/77"):
        reader.read_many(wholes(1, 77, 2, 88))


@pytest.mark.parametrize(
    "bad", ["gopher://x/y", "oss://bucket-without-key", "blockcache::oss://bucket/x", "oss://a b/x"]
)
def test_a_range_without_a_storage_costs_its_neighbours_nothing(reader: ObjectReader, bad: str) -> None:
    for views in (False, True):
        found = reader.read_each([ByteRange(url(4)), ByteRange(bad), ByteRange(url(5))], views=views)
        assert (found[0], found[2]) == (b"\4" * 3000, b"\5" * 3000)
        assert isinstance(found[1], OptionError)
    looks = reader.look_each([ByteRange(url(4)), ByteRange(bad)])
    assert isinstance(looks[0], ObjectState)
    assert isinstance(looks[1], OptionError)
    (alone,) = reader.read_each([ByteRange(bad)])
    assert (type(alone), str(alone)) == (type(found[1]), str(found[1]))


def test_neighbouring_ranges_are_one_request(server: OSSServer, reader: ObjectReader) -> None:
    spans = [ByteRange(url(3), 100, 200), ByteRange(url(3), 0, 50), ByteRange(url(3), 190, 300)]
    assert [len(data) for data in reader.read_many(spans)] == [100, 50, 110]
    assert [request.headers["range"] for request in server.requests] == ["bytes=0-299"]


def test_an_object_that_is_wanted_twice_is_read_once(server: OSSServer, reader: ObjectReader) -> None:
    assert [data[0] for data in reader.read_many(wholes(5, 6, 5))] == [5, 6, 5]
    assert len(server.requests) == 2


def test_a_range_beyond_the_end_costs_its_neighbours_nothing(reader: ObjectReader) -> None:
    spans = [ByteRange(url(3), 2900, 2950), ByteRange(url(3), 2960, 3100)]
    good, bad = reader.read_each(spans)
    assert good == b"\3" * 50
    assert isinstance(bad, TruncatedObjectError)


def test_a_pickle_carries_the_options(server: OSSServer, reader: ObjectReader) -> None:
    reader.read(url(1))
    with pickle.loads(pickle.dumps(reader)) as copy:
        assert copy.options == reader.options
        assert copy.read(url(2))[0] == 2
    assert server.connections == 2


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_forked_child_makes_its_own_connections(server: OSSServer, concurrency: int) -> None:
    server.latency_s = 0.02
    with (
        ObjectReader(server.storage_options(), options=ReadOptions(concurrency=concurrency)) as reader,
        ThreadPoolExecutor(1) as busy,
    ):
        reader.read(url(0))
        meanwhile = busy.submit(reader.read_many, wholes(*range(COUNT)))
        child = os.fork()
        if child == 0:
            try:
                right = [data[0] for data in reader.read_many(wholes(*range(8)))] == [*range(8)]
            finally:
                os._exit(0 if right else 1)
        _, status = os.waitpid(child, 0)
        assert [data[0] for data in meanwhile.result()] == [*range(COUNT)]
    assert os.waitstatus_to_exitcode(status) == 0
    if concurrency == 1:
        assert server.connections == 2


def test_many_threads_share_a_reader(reader: ObjectReader) -> None:
    def batch(turn: int) -> bool:
        numbers = [(turn + step) % COUNT for step in range(10)]
        return [data[0] for data in reader.read_many(wholes(*numbers))] == numbers

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(batch, range(30)))


def test_closing_ends_threads_and_connections(server: OSSServer, reader: ObjectReader) -> None:
    reader.read_many(wholes(*range(COUNT)))
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dpflow-read")]
    assert reader.read(url(1))[0] == 1


def test_storages_can_be_mixed_in_a_batch(reader: ObjectReader, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"local")
    assert reader.read_many([ByteRange(f"file://{tmp_path}/x"), *wholes(4)]) == [b"local", b"\4" * 3000]


def test_what_a_task_raises_reaches_the_caller() -> None:
    """Whichever thread runs it: a helper's error may not be lost."""
    everybody_is_there = threading.Barrier(4)

    def task(fails: bool) -> None:
        everybody_is_there.wait(150)
        if fails:
            raise ZeroDivisionError

    for failing in range(4):
        overlap = Overlap(4)
        with pytest.raises(ZeroDivisionError):
            overlap.run(task, [number == failing for number in range(4)], is_remote=True)
        overlap.close()


def test_fast_local_reads_need_no_threads(tmp_path: Path) -> None:
    started: list[str] = []

    def task(number: int) -> None:
        started.append(threading.current_thread().name)

    overlap = Overlap(8)
    overlap.run(task, range(20), is_remote=False)
    assert set(started) == {threading.current_thread().name}


def test_a_local_read_that_was_interrupted_starts_no_threads() -> None:
    ran_in: set[int] = set()
    seconds = [0.00003] * 8 + [0.05] + [0.00003] * 4  # of the first read of each batch
    clock = itertools.accumulate(itertools.chain.from_iterable((0.0, second) for second in seconds))
    overlap = Overlap(8, clock=lambda: next(clock))
    for _ in seconds:
        overlap.run(lambda number: ran_in.add(threading.get_ident()), range(20), is_remote=False)
    assert ran_in == {threading.get_ident()}


def test_slow_local_reads_get_threads() -> None:
    together = threading.Barrier(2)
    first = True

    def task(number: int) -> None:
        nonlocal first
        if first:
            first = False
            threading.Event().wait(0.01)  # as long as a mount far away takes
        else:
            together.wait(150)  # passes only when two threads are here

    overlap = Overlap(2)
    overlap.run(task, range(3), is_remote=False)
    overlap.close()


def test_views_of_neighbours_in_a_local_file_are_of_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that copies parts of each range saves the copy that cuts the range out, and most of the calls."""
    each, content = 16 << 10, os.urandom(1 << 20)
    (tmp_path / "shard").write_bytes(content)
    spans = [ByteRange(f"{tmp_path}/shard", first, first + each) for first in range(0, len(content), each)]
    reads: list[int] = []
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    with ObjectReader() as reader:
        views, viewing = reader.read_each(spans, views=True), len(reads)
        copies = reader.read_each(spans)
    assert [bytes(view) for view in views if not isinstance(view, Exception)] == copies
    assert copies == [content[first : first + each] for first in range(0, len(content), each)]
    assert (viewing, len({id(view.obj) for view in views if isinstance(view, memoryview)})) == (4, 4)
    assert {type(copy) for copy in copies} == {bytes}


def test_views_of_a_server_are_bytes(server: OSSServer, reader: ObjectReader) -> None:
    spans = [ByteRange(url(3), 100, 200), ByteRange(url(3), 200, 250)]
    assert reader.read_each(spans, views=True) == reader.read_each(spans) == [b"\3" * 100, b"\3" * 50]
    assert isinstance(reader.read_each([*spans, ByteRange(url(3), 2900, 3100)], views=True)[2], TruncatedObjectError)
