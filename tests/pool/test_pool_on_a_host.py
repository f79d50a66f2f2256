"""The pool of one host, with real processes: the same samples, storage read once, and deaths that cost speed alone."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S, wait
from tests.support.oss_server import Fault, OSSServer
from torch_dpflow import DPFlowDataLoader, PooledDataset
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.errors import (
    DPFlowError,
    OptionError,
    PeerLostError,
    PoolFullError,
    StorageError,
    UsageError,
)
from torch_dpflow.pool import CachedDataset, DataClient, DataServer
from torch_dpflow.pool.messages import (
    ELSEWHERE,
    HERE,
    MAX_MESSAGE_BYTES,
    DatasetSource,
    GetRecordStates,
    PreloadDataset,
    RecordStates,
)
from torch_dpflow.pool.reader.server_memory import LocalServer
from torch_dpflow.pool.server import leader
from torch_dpflow.pool.server.held_dataset import HeldDataset
from torch_dpflow.pool.server.leader_state import KnownDataset
from torch_dpflow.pool.sources import identity_of, open_source, source_of
from torch_dpflow.pool.transport.address import find_directory, socket_path
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.segments import PoolSegment

COUNT = 40


@pytest.fixture(scope="module", autouse=True)
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address of a server that lives as long as this module."""
    folder = tmp_path_factory.mktemp("pool") / "p"
    with server(folder) as process:
        yield folder
    assert process.returncode == 0


def packs(stored: StoredDataset) -> list[Path]:
    """The files that its samples lie in."""
    urls = {stored.data_url(one) for one in stored.samples()}
    return [Path(url.removeprefix("file://")) for url in sorted(urls)]


def opened_set(stored: StoredDataset) -> HeldDataset:
    """A set of which nothing is held yet."""
    source = source_of(stored, None)
    return HeldDataset(source, open_source(source, identity_of(stored)))


def info_of(stored: StoredDataset, address: Path) -> CachedDataset | None:
    found = [
        one
        for one in DataClient(address, silence_s=PATIENCE_S).cached_datasets()
        if one.identity == identity_of(stored)
    ]
    return found[0] if found else None


def is_loaded(stored: StoredDataset, address: Path) -> bool:
    info = info_of(stored, address)
    return info is not None and info.is_placed and info.loaded == COUNT


def test_a_preloaded_set_is_read_from_memory_also_without_its_files(stored: StoredDataset, pool: Path) -> None:
    client, seen = DataClient(pool, silence_s=PATIENCE_S), list[CachedDataset]()
    info = client.preload(stored, progress=seen.append)
    assert (info.records, info.placed, info.loaded, info.failed) == (COUNT, COUNT, COUNT, 0)
    assert seen[-1] == info
    assert info.is_explicit
    for pack in packs(stored):
        pack.unlink()
    assert client.read_batch(stored, [*range(COUNT)]) == numbers(COUNT)
    assert client.read(stored, -1) == numbers(COUNT)[-1]
    assert client.dataset(stored).hits == COUNT + 1
    assert [one.readers for one in client.cached_datasets() if one.identity == info.identity] == [1]
    client.close()
    client.unload(stored)
    with pytest.raises(UsageError, match="not in the pool"):
        client.unload(stored)


def test_a_server_ends_by_a_signal_that_another_of_its_threads_has_got(tmp_path: Path) -> None:
    with server(tmp_path / "p") as process:
        threads = Path(f"/proc/{process.pid}/task")
        wait(lambda: len([*threads.iterdir()]) > 1, what="its threads")
        other = next(one for one in map(int, os.listdir(threads)) if one != process.pid)
        assert ctypes.CDLL(None).tgkill(process.pid, other, signal.SIGTERM) == 0
        assert process.wait(PATIENCE_S) == 0


def test_workers_of_a_loader_get_the_same_samples(stored: StoredDataset, pool: Path) -> None:
    with closing(PooledDataset(stored, pool, silence_s=PATIENCE_S)) as dataset:
        for _ in range(2):
            loader = DPFlowDataLoader(dataset, batch_size=7, shuffle=True, num_workers=2, collate_fn=list)
            samples = [sample for batch in loader for sample in batch]
            assert sorted(samples, key=lambda sample: sample[1]["number"]) == numbers(COUNT)
        wait(lambda: is_loaded(stored, pool), what="the implicit set")
        assert [dataset[index] for index in range(COUNT)] == numbers(COUNT)
        assert (dataset.hits, dataset.misses) == (COUNT, 0)


@pytest.mark.slow
def test_each_sample_is_read_from_storage_once_for_all_processes(pool: Path) -> None:
    with OSSServer() as oss:
        oss.buckets.create("bucket")
        store = DatasetStore.create("oss://bucket/datasets", **oss.storage_options())
        stored = publish(store, Numbered(COUNT))
        with closing(DataClient(pool, silence_s=PATIENCE_S)) as client:
            first = len(oss.requests)
            client.preload(stored)
            data = {stored.data_url(one).removeprefix("oss://bucket/") for one in stored.samples()}
            loaded = Counter(one.key for one in oss.requests[first:] if one.method == "GET")
            assert {key: loaded[key] for key in data} == dict.fromkeys(data, 1)
            before = Counter(one.key for one in oss.requests if one.method == "GET")
            for _ in range(3):
                with closing(PooledDataset(stored, pool, silence_s=PATIENCE_S)) as dataset:
                    assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            after = Counter(one.key for one in oss.requests if one.method == "GET")
            assert {key: after[key] - before[key] for key in data} == dict.fromkeys(data, 0)
        for files in (store.files, stored.files):
            files.close()
            files.filesystem._session.session.close()


def test_a_killed_server_costs_no_sample(stored: StoredDataset, tmp_path: Path) -> None:
    address = tmp_path / "p"
    with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
        assert dataset.read_each(range(5)) == numbers(5)  # there is no server yet
        with server(address) as process:
            DataClient(address, silence_s=PATIENCE_S).preload(stored)
            dataset.close()
            half = COUNT // 2
            assert dataset.read_each(range(half)) == numbers(COUNT)[:half]
            assert dataset.hits == half
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            assert dataset.hits >= 2 * half  # what was mapped stays
            assert dataset.misses <= half


@pytest.mark.slow
def test_epochs_of_two_loaders_whose_server_is_killed_and_started_again(store: DatasetStore, tmp_path: Path) -> None:
    stored = publish(store, Numbered(300), shard_size=10)
    chance = random.Random(1)
    expected = dict(enumerate(numbers(300)))
    with closing(PooledDataset(stored, tmp_path / "p", silence_s=PATIENCE_S)) as dataset:
        for _ in range(10):
            with server(tmp_path / "p") as process:
                loaders = [
                    DPFlowDataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, collate_fn=list)
                    for _ in range(2)
                ]
                batches = list[list[Any]]()
                at = chance.randrange(38)
                for number, pair in enumerate(zip(*loaders)):
                    batches += pair
                    if number == at:
                        os.kill(process.pid, chance.choice([signal.SIGKILL, signal.SIGTERM]))
                samples = [sample for batch in batches for sample in batch]
                assert Counter(sample[1]["number"] for sample in samples) == dict.fromkeys(expected, 2)
                assert all(sample == expected[sample[1]["number"]] for sample in samples)


@pytest.mark.slow
def test_a_frozen_server_costs_a_wait_and_no_sample(stored: StoredDataset, tmp_path: Path) -> None:
    address = tmp_path / "p"
    with server(address) as process, closing(PooledDataset(stored, address)) as dataset:
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        assert dataset.read_each(range(3)) == numbers(3)
        os.kill(process.pid, signal.SIGSTOP)
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        os.kill(process.pid, signal.SIGCONT)
        wait(lambda: dataset.read_each(range(COUNT)) == numbers(COUNT) and dataset.hits > 2 * COUNT)


def test_an_idle_set_goes_and_comes_back_with_its_reader(stored: StoredDataset, tmp_path: Path) -> None:
    with (
        inner_server(tmp_path / "p", 1 << 20, idle_s=0.5),
        closing(PooledDataset(stored, tmp_path / "p", silence_s=PATIENCE_S)) as dataset,
    ):
        wait(lambda: dataset.read_each(range(COUNT)) == numbers(COUNT) and dataset.hits >= COUNT)
        dataset._pool._reading.get()._lookup.close()  # as after a silence
        wait(lambda: info_of(stored, tmp_path / "p") is None)
        before = dataset.hits
        wait(lambda: dataset.read_each(range(COUNT)) == numbers(COUNT) and dataset.hits >= before + COUNT)


@pytest.mark.slow
def test_a_new_server_takes_over(stored: StoredDataset, tmp_path: Path) -> None:
    address = tmp_path / "p"
    with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
        with server(address) as process:
            wait(lambda: dataset.read_each(range(COUNT)) == numbers(COUNT) and is_loaded(stored, address))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        dataset.close()
        with server(address):
            wait(lambda: dataset.read_each(range(COUNT)) == numbers(COUNT) and is_loaded(stored, address))
            for pack in packs(stored):
                pack.unlink()
            wait(lambda: all(isinstance(one, tuple) for one in dataset.read_each(range(COUNT))))


@pytest.mark.parametrize("reads", [2, *(pytest.param(reads, marks=pytest.mark.slow) for reads in (0, 1, 3, 5, 8))])
def test_a_server_that_is_killed_while_it_loads(stored: StoredDataset, tmp_path: Path, reads: int) -> None:
    """After some reads, so that it dies before, while and after it loads."""
    address = tmp_path / "p"
    with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset, server(address) as process:
        for start in range(0, reads * 4, 4):
            assert dataset.read_each(range(start, start + 4)) == numbers(COUNT)[start : start + 4]
        os.kill(process.pid, signal.SIGKILL)
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        process.wait()


def test_an_unloaded_set_is_read_from_storage_until_it_is_loaded_again(stored: StoredDataset, pool: Path) -> None:
    client = DataClient(pool, silence_s=PATIENCE_S)
    client.preload(stored)
    with closing(PooledDataset(stored, pool, silence_s=PATIENCE_S)) as dataset:
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        client.unload(stored)
        assert info_of(stored, pool) is None
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        assert (dataset.hits, dataset.misses) == (COUNT, COUNT)
        assert info_of(stored, pool) is None
        client.preload(stored)
        wait(lambda: dataset[0] == numbers(COUNT)[0] and dataset.hits > COUNT, what="a sample from memory")
        misses = dataset.misses
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        assert dataset.misses == misses


def test_a_set_that_does_not_fit_is_refused_or_held_in_part(store: DatasetStore, tmp_path: Path) -> None:
    stored = publish(store, Numbered(400), shard_size=10)
    address = tmp_path / "p"
    with inner_server(address, 8 << 10), closing(DataClient(address, silence_s=PATIENCE_S)) as client:
        with pytest.raises(PoolFullError, match="have a part of this one held"):
            client.preload(stored)
        assert client.cached_datasets() == []
        info = client.preload(stored, fit="part")
        assert 0 < info.placed < 400
        assert info.placed == info.loaded
        assert info.reserved_bytes <= 8 << 10
        assert client.read_batch(stored, range(400)) == numbers(400)
        dataset = client.dataset(stored)
        assert (dataset.hits, dataset.misses) == (info.placed, 400 - info.placed)
        with pytest.raises(PoolFullError, match="or load a part"):
            client.preload(stored)
        assert client.read_batch(stored, range(400)) == numbers(400)


def test_samples_that_cannot_be_read_are_told_and_fail_as_without_the_pool(stored: StoredDataset, pool: Path) -> None:
    broken = packs(stored)[0]
    broken.unlink()
    client = DataClient(pool, silence_s=PATIENCE_S)
    with pytest.raises(StorageError, match=f"samples of {stored.ref} are not in the pool: ObjectMissingError"):
        client.preload(stored)
    info = client.preload(stored, on_error="skip")
    assert info.loaded + info.failed == COUNT
    assert info.failed > 0
    with closing(PooledDataset(stored, pool, silence_s=PATIENCE_S)) as dataset:
        results = dataset.read_each(range(COUNT))
        assert sum(isinstance(one, StorageError) for one in results) == info.failed
        assert [one for one in results if isinstance(one, tuple)] == [
            sample for sample, one in zip(numbers(COUNT), results) if isinstance(one, tuple)
        ]
    client.unload(stored)


def test_samples_whose_storage_was_gone_come_once_it_is_back(tmp_path: Path) -> None:
    with OSSServer() as oss:
        oss.buckets.create("bucket")
        stored = publish(DatasetStore.create("oss://bucket/datasets", **oss.storage_options()), Numbered(COUNT))
        opened, hasty = open_source(source_of(stored, None), identity_of(stored)), ReadOptions(attempts=1)
        reader = SampleReader(stored, read_options=hasty)
        with closing(HeldDataset(source_of(stored, None), opened._replace(reader=reader))) as held:
            for one in {stored.data_url(one).removeprefix("oss://bucket/") for one in stored.samples()}:
                oss.faults.add(Fault.BROKEN, key=one)
            held.fill(range(opened.records.stripes))
            wait(lambda: held.counts == (0, COUNT), what="all that failed")
            assert held.want([0], 0.0).states == bytes([ELSEWHERE])
            assert "StorageUnavailableError" in held.error
            oss.faults.clear()
            wait(lambda: held.counts == (COUNT, 0), what="what is read again")
            assert held.want([0], 0.0).states == bytes([HERE])
            assert held.error == ""
        stored.files.close()
        stored.files.filesystem._session.session.close()


@pytest.mark.slow
def test_readers_find_in_memory_what_came_after_its_storage_was_gone(pool: Path) -> None:
    with OSSServer() as oss:
        oss.buckets.create("gone")
        store = DatasetStore.create("oss://gone/datasets", **oss.storage_options())
        stored = publish(store, Numbered(COUNT))
        client = DataClient(pool, silence_s=PATIENCE_S)
        for one in {stored.data_url(one).removeprefix("oss://gone/") for one in stored.samples()}:
            oss.faults.add(Fault.BROKEN, key=one)
        assert client.preload(stored, on_error="skip").failed == COUNT
        hasty = ReadOptions(attempts=1)
        with closing(PooledDataset(stored, pool, silence_s=PATIENCE_S, read_options=hasty)) as dataset:
            assert all(isinstance(one, StorageError) for one in dataset.read_each(range(COUNT)))
            oss.faults.clear()
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            wait(lambda: is_loaded(stored, pool), what="what is read again")

            def are_in_memory() -> bool:
                misses = dataset.misses
                return dataset.read_each(range(COUNT)) == numbers(COUNT) and dataset.misses == misses

            wait(are_in_memory, what="a look at the server")
        client.unload(stored)
        stored.files.close()
        stored.files.filesystem._session.session.close()


def test_unauthenticated_peers_disturb_nobody(stored: StoredDataset, pool: Path) -> None:
    path, answers = socket_path(find_directory(pool)), set[bytes]()
    for packet in (b"\x00", b"\xc1" * 100, b"x" * 65_000, b"\x82\xa4type"):
        for length in (len(packet), len(packet) + 1, 0, MAX_MESSAGE_BYTES + 1, (1 << 32) - 1):
            with socket.socket(socket.AF_UNIX) as peer, suppress(ConnectionResetError):  # it has bytes left to read
                peer.connect(path)
                peer.sendall(struct.pack("<I", length) + packet)
                peer.shutdown(socket.SHUT_WR)
                peer.settimeout(PATIENCE_S)
                answer = b"".join(iter(lambda: peer.recv(1 << 16), b""))  # until the server closes it
                answers.add(answer)
    assert all(b"clients need this server's release" in answer for answer in answers - {b""})
    assert len(answers) > 1, "a message that cannot be decoded is answered"
    DataClient(pool, silence_s=PATIENCE_S).preload(stored)
    connection = PoolConnection(pool)
    for records in ([COUNT], [-1], [0] * 5000):
        with pytest.raises(UsageError, match="that exist are allowed"):
            connection.request(GetRecordStates(identity_of(stored), records))
    assert connection.request(GetRecordStates(b"?" * 16, [0])) == (RecordStates(bytes([ELSEWHERE]), []), [])
    connection.close()
    DataClient(pool, silence_s=PATIENCE_S).unload(stored)


def test_a_list_of_more_sets_than_a_request_has_room_for(tmp_path: Path) -> None:
    source = DatasetSource(store="s", options={}, ref="core/numbers:v1:train")
    with inner_server(tmp_path / "p", 1 << 20) as serving, PoolConnection(tmp_path / "p") as connection:
        for number in range(1000):
            name = number.to_bytes(16, "big")
            request = PreloadDataset(source=source, identity=name, is_explicit=True, whole=True)
            serving._pool._datasets[name] = KnownDataset(request, True, True)
        listed = connection.contents()
        assert [int.from_bytes(one.identity, "big") for one in listed.datasets] == [*range(1000)]
        assert listed.free == 1 << 20


def test_a_server_without_a_free_thread_serves_again_later(tmp_path: Path) -> None:
    with inner_server(tmp_path / "p", 1 << 20), PoolConnection(tmp_path / "p") as before:
        assert before.contents().datasets == []  # by now all of its threads run
        usual = threading.stack_size(1 << 48)
        try:
            with pytest.raises(PeerLostError), PoolConnection(tmp_path / "p") as refused:
                refused.contents()
        finally:
            threading.stack_size(usual)
        assert before.contents().datasets == []
        with PoolConnection(tmp_path / "p") as after:
            assert after.contents().datasets == []


def test_a_set_whose_thread_cannot_start_is_refused_or_left_to_its_readers(
    stored: StoredDataset, tmp_path: Path
) -> None:
    held = opened_set(stored)
    with inner_server(tmp_path / "p", 1 << 20), PoolConnection(tmp_path / "p") as connection:
        assert connection.contents().datasets == []  # by now all of its threads run
        usual = threading.stack_size(1 << 48)
        try:
            with pytest.raises(PoolFullError, match="ulimit -u"):
                connection.preload(source_of(stored, None), identity_of(stored), whole=True)
            held.fill([0])
        finally:
            threading.stack_size(usual)
        assert connection.contents().datasets == []
        assert connection.preload(source_of(stored, None), identity_of(stored), whole=True).failed == 0
    assert (held.is_placed, held.counts) == (True, (0, len(held.records.records_of(0))))
    assert "ulimit -u" in held.error
    held.close()


def test_memory_of_a_set_that_is_given_up_before_it_is_made_is_freed(stored: StoredDataset) -> None:
    held = opened_set(stored)
    held.close()
    held.fill([0])
    wait(lambda: held.is_placed, what="its thread")
    assert held.segments == []


def test_stripes_that_are_ordered_again_before_their_memory_is_made_get_one_segment(
    stored: StoredDataset,
) -> None:
    with closing(opened_set(stored)) as held:
        with held._changed:  # no segment is entered meanwhile
            held.fill(range(held.records.stripes))
            held.fill(range(held.records.stripes))
        wait(lambda: held.is_placed, what="its threads")
        assert len(held.segments) == 1
        wait(lambda: held.counts == (COUNT, 0), what="all samples")
        found = [held.look(one, lambda record: None) for one in range(COUNT)]
        assert [bytes(one) for one in found if isinstance(one, memoryview)] == [one for one, _ in numbers(COUNT)]


@pytest.mark.parametrize("asks_for_segments", [False, True])
def test_a_reader_maps_anew_what_is_held_again_under_its_connection(
    stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_for_segments: bool
) -> None:
    """Read what the server holds now, whether the reader requests more segments first or the states of records."""
    never, source, identity = _StuckReader(), source_of(stored, None), identity_of(stored)
    opened = [open_source(source, identity)._replace(reader=one) for one in (never, SampleReader(stored))]
    monkeypatch.setattr(leader, "open_source", lambda *which: opened.pop(0))
    request = PreloadDataset(source=source, identity=identity, is_explicit=True, whole=True)
    with inner_server(tmp_path / "p", 1 << 20), PoolConnection(tmp_path / "p") as connection:

        def is_placed() -> bool:
            info = connection.get(request, CachedDataset)
            return info.is_placed and info.placed == COUNT

        wait(is_placed, what="memory that nothing is read into")
        ready: dict[int, PoolSegment] = {}
        per_stripe = open_source(source, identity).records.per_stripe
        near = LocalServer(tmp_path / "p", PoolConnection, identity, per_stripe, PATIENCE_S, ready)
        assert near.send([])
        assert not near.receive([])
        connection.unload(identity)
        assert connection.preload(source, identity, whole=True).loaded == COUNT
        if asks_for_segments:
            near.refresh()
        assert near.send(range(COUNT))
        assert near.receive(range(COUNT))
        assert [near.read(one, copy=True) for one in range(COUNT)] == [one for one, _ in numbers(COUNT)]
        assert near.retired == set()
        near.disconnect()
        never.event.set()


class _StuckReader:
    """Reads nothing before the end of its test."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def read_each(self, indices: Sequence[int]) -> list[DPFlowError]:
        self.event.wait()
        return [StorageError("the test has ended")] * len(indices)

    def close(self) -> None:
        pass


def test_many_readers_may_come_at_once(tmp_path: Path) -> None:
    serving = DataServer(1 << 20, tmp_path / "p")  # it accepts nobody yet
    with ExitStack() as stack:
        stack.callback(serving.stop)
        for _ in range(400):
            stack.enter_context(closing(PoolConnection(tmp_path / "p")))


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "p"
    open_to_all.mkdir(mode=0o755)
    open_to_all.chmod(0o755)
    with pytest.raises(OptionError, match="no other user may enter"):
        PoolConnection(open_to_all)
    with pytest.raises(PeerLostError, match="no server of the pool answers"):
        PoolConnection(tmp_path / "q")
    with pytest.raises(OptionError, match="too long for a socket"):
        PoolConnection(tmp_path / ("q" * 100))
