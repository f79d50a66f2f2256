"""Sets that do not fit into the pool: a part stays in memory, and the rest is read ahead in the announced order."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Subset

from tests.new_process import interpreter
from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S, TestCluster, wait
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow import DPFlowDataLoader, JobOptions, PooledDataset
from torch_dpflow.caches import ALSDCache
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.flows.stage import StagedDataset
from torch_dpflow.pool import DataClient, DataServer
from torch_dpflow.pool.messages import AnnounceAccessPlan
from torch_dpflow.pool.planning.read_ahead import ReadAhead
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.data_frames import CONTROL, hello

COUNT = 120
CONTENTS = [np.random.default_rng(number).bytes(1000 - number % 7) for number in range(COUNT)]
#: Memory for half of them, and what is read ahead into.
HALF, AHEAD = COUNT * 1024 // 2 + COUNT * 20, 64 << 11


@pytest.fixture(scope="module")
def oss() -> Iterator[OSSServer]:
    with OSSServer() as serving:
        serving.buckets.create("bucket")
        for number, content in enumerate(CONTENTS):
            stored = StoredObject(data=content, content_type="image/jpeg")
            serving.buckets.put("bucket", f"datasets/core/objects/data/{number}", stored)
        yield serving


@pytest.fixture(scope="module")
def stored(oss: OSSServer) -> Iterator[StoredDataset]:
    """A dataset whose samples are objects of their own, so that reads can be counted."""
    store = DatasetStore.create("oss://bucket/datasets", **oss.storage_options())
    draft = Draft(store, "core/objects", "v1")
    items = [Item(path=f"{number}", length=len(one), meta={"n": number}) for number, one in enumerate(CONTENTS)]
    draft.add("train", IterableImporter(items, root="data"), shard_size=16)
    draft.publish()
    opened = store.open("core/objects:v1:train")
    yield opened
    for files in (store.files, opened.files):
        files.close()
        files.filesystem._session.session.close()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The plan and position of each record that servers of this process are asked to read ahead."""
    read, found = ReadAhead.read, list[tuple[str, int]]()

    def noted(machine: ReadAhead, reader: str, position: int) -> Any:
        found.append((reader, position))
        return read(machine, reader, position)

    monkeypatch.setattr(ReadAhead, "read", noted)
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    write_connection_file(file, generate_keys("", certificates=True))
    return file


@pytest.fixture
def pool(stored: StoredDataset, keys: Path, tmp_path: Path) -> Iterator[DataServer]:
    """A server that holds half of the set."""
    listen = find_address("tcp://127.0.0.1:0", keys)
    with inner_server(tmp_path / "p", HALF, ahead_bytes=AHEAD, listen=listen) as serving:
        info = DataClient(serving.directory, silence_s=PATIENCE_S).preload(stored, fit="part")
        assert COUNT * 0.4 < info.placed == info.loaded < COUNT * 0.6
        yield serving


def pooled(stored: StoredDataset, pool: DataServer) -> closing[PooledDataset]:
    return closing(PooledDataset(stored, pool.directory, silence_s=PATIENCE_S))


def over_tcp(stored: StoredDataset, pool: DataServer, keys: Path) -> closing[PooledDataset]:
    return closing(PooledDataset(stored, str(pool.address), connection=keys, silence_s=PATIENCE_S))


def is_mapped(dataset: PooledDataset) -> bool:
    """Whether what is read ahead comes by mapped memory."""
    connection = dataset._pool._reading.get()._lookup.connection
    assert connection is not None
    return connection.passes_memory


def epoch(dataset: Any, *, workers: int = 0, seed: int = 0) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [*loader_of(dataset, workers, generator)]


def loader_of(dataset: Any, workers: int, generator: torch.Generator) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(dataset, 4, shuffle=True, num_workers=workers, generator=generator, collate_fn=list)


def digest(batches: list[list[Any]]) -> str:
    return hashlib.sha256(repr(batches).encode()).hexdigest()


def reads(oss: OSSServer, since: int) -> Counter[str]:
    return Counter(one.key for one in oss.requests[since:] if one.method == "GET" and "/data/" in one.key)


def rest_of(stored: StoredDataset, pool: DataServer) -> int:
    (held,) = pool._holdings.all()
    return COUNT - held.counts[0]


def test_storage_is_read_once_for_each_sample_without_a_place_whatever_the_order(
    oss: OSSServer, stored: StoredDataset, pool: DataServer
) -> None:
    rest = rest_of(stored, pool)
    with pooled(stored, pool) as dataset, closing(DatasetReader(stored)) as plain:
        for seed in range(3):
            expected, since = digest(epoch(plain, seed=seed)), len(oss.requests)
            assert digest(epoch(dataset, seed=seed)) == expected
            found = reads(oss, since)
            assert (len(found), found.total()) == (rest, rest)
        assert (dataset.hits, dataset.misses) == (3 * COUNT, 0)


@pytest.mark.parametrize("is_far", [False, True])
def test_a_server_over_the_network_reads_ahead_too(
    oss: OSSServer, stored: StoredDataset, pool: DataServer, keys: Path, is_far: bool
) -> None:
    rest = rest_of(stored, pool)
    if is_far:
        pool.directory.rename(pool.directory.with_name("q"))  # as in another container
    with over_tcp(stored, pool, keys) as dataset, closing(DatasetReader(stored)) as plain:
        for seed in range(2):
            expected, since = digest(epoch(plain, seed=seed)), len(oss.requests)
            assert digest(epoch(dataset, seed=seed)) == expected
            found = reads(oss, since)
            assert (len(found), found.total()) == (rest, rest)
        assert is_mapped(dataset) != is_far
        assert (dataset.hits, dataset.misses) == (2 * COUNT, 0)
        expected, since = digest(epoch(plain, seed=9)), len(oss.requests)
        assert digest(epoch(dataset, workers=1, seed=9)) == expected
        assert reads(oss, since).total() == rest


@pytest.mark.parametrize("is_far", [False, True])
def test_the_orders_of_a_job_that_is_killed_are_forgotten(
    stored: StoredDataset, pool: DataServer, keys: Path, is_far: bool
) -> None:
    address = pool.address if is_far else pool.directory
    order = f"identity={identity_of(stored)!r}, plan=name, first=0, total=total, spread=8, records=bytes(8)"
    job = (
        "from torch_dpflow.pool.transport.control_connection import PoolConnection\n"
        "from torch_dpflow.pool.transport.address import find_address\n"
        "from torch_dpflow.pool.messages import AnnounceAccessPlan\n"
        f"connection = PoolConnection(find_address({str(address)!r}, {str(keys)!r}))\n"
        f"for name, total in (('whole', 2), ('in part', 3)): connection.request(AnnounceAccessPlan({order}))\n"
        "print('announced', flush=True)\n"
        "input()"
    )
    with interpreter(job, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "announced\n"
        assert pool._holdings.ahead._readings
        process.kill()
    wait(lambda: pool._holdings.ahead._left == AHEAD, what="the end of reading ahead")


def test_an_unauthenticated_peer_announces_nothing(stored: StoredDataset, pool: DataServer) -> None:
    order = AnnounceAccessPlan(identity=identity_of(stored), plan="its", first=0, total=2, spread=8, records=bytes(8))
    packet = msgspec.msgpack.encode(order)
    _, _, port = str(pool.address).rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S) as peer:
        peer.sendall(hello(CONTROL) + len(packet).to_bytes(4, "little") + packet)
        while peer.recv(1 << 16):
            pass
    assert not pool._holdings.ahead._readings


def test_workers_read_what_the_training_process_has_announced(
    oss: OSSServer, stored: StoredDataset, pool: DataServer, ahead: list[Any]
) -> None:
    with pooled(stored, pool) as dataset, closing(DatasetReader(stored)) as plain:
        expected, since = digest(epoch(plain, seed=5)), len(oss.requests)
        assert digest(epoch(dataset, workers=2, seed=5)) == expected
        # A batch that is taken over from a slow worker may be read by both.
        assert rest_of(stored, pool) <= reads(oss, since).total() <= COUNT
        assert len(ahead) >= rest_of(stored, pool)


class Unsettled(RandomSampler):
    """Not known to fix its order when the epoch begins, as that of several jobs is not."""


def test_an_order_that_is_drawn_on_the_way_is_read_ahead_as_far_as_it_is(
    oss: OSSServer, stored: StoredDataset, pool: DataServer, ahead: list[Any]
) -> None:
    with pooled(stored, pool) as dataset, closing(DatasetReader(stored)) as plain:
        expected = digest([*of_sampler(plain, 0)])
        for _ in range(2):
            since = len(oss.requests)
            assert digest([*of_sampler(dataset, 1)]) == expected
            assert reads(oss, since).total() == rest_of(stored, pool)
            assert len(ahead) >= rest_of(stored, pool)
        loader = of_sampler(dataset, 1)
        begun = iter(loader)
        batches = [next(begun) for _ in range(7)]
        state = loader.state_dict()
        del begun
        again = of_sampler(dataset, 1)
        again.load_state_dict(state)
        assert digest([*batches, *again]) == expected


@pytest.mark.parametrize("is_far", [False, True])
def test_drawing_an_order_waits_for_no_server(stored: StoredDataset, tmp_path: Path, keys: Path, is_far: bool) -> None:
    more = ["--ahead-memory", f"{AHEAD}B", "--listen", "tcp://127.0.0.1:0", "--connection", str(keys)]
    with server(tmp_path / "p", f"{HALF}B", more=more) as process:
        DataClient(tmp_path / "p", silence_s=PATIENCE_S).preload(stored, fit="part")
        address = process.said.rpartition(" and at ")[2].partition(",")[0] if is_far else tmp_path / "p"
        if is_far:
            (tmp_path / "p").rename(tmp_path / "q")  # as in another container
        with closing(PooledDataset(stored, address, connection=keys, silence_s=10 * PATIENCE_S)) as dataset:
            dataset.announce_order(lambda: np.arange(0), 8)
            os.kill(process.pid, signal.SIGSTOP)
            for _ in range(500):  # more than the buffer of a Unix socket takes
                dataset.announce_order(lambda: np.arange(COUNT), 8, extends=True)
            os.kill(process.pid, signal.SIGCONT)
            assert [content for content, _ in dataset.read_each(range(COUNT))] == CONTENTS


def test_orders_are_announced_to_a_server_that_has_begun_anew(stored: StoredDataset, tmp_path: Path) -> None:
    with closing(PooledDataset(stored, tmp_path / "p", silence_s=PATIENCE_S)) as dataset:
        for _ in range(2):
            with inner_server(tmp_path / "p", HALF, ahead_bytes=AHEAD) as pool:
                DataClient(pool.directory, silence_s=PATIENCE_S).preload(stored, fit="part")

                def is_told(pool: DataServer = pool) -> bool:
                    dataset.announce_order(lambda: np.arange(COUNT), 8)
                    return bool(pool._holdings.ahead._readings)

                wait(is_told, what="an order at the server")


def of_sampler(dataset: Any, workers: int) -> DPFlowDataLoader[Any]:
    sampler = Unsettled(dataset, generator=torch.Generator().manual_seed(4))
    return DPFlowDataLoader(dataset, 4, sampler=sampler, num_workers=workers, collate_fn=list)


@pytest.mark.parametrize("is_far", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_shared_flow_reads_ahead_what_its_workers_load(
    oss: OSSServer,
    stored: StoredDataset,
    pool: DataServer,
    keys: Path,
    common_cluster: TestCluster,
    is_far: bool,
    ahead: list[Any],
) -> None:
    with over_tcp(stored, pool, keys) if is_far else pooled(stored, pool) as dataset:
        if is_far:
            pool.directory.rename(pool.directory.with_name("q"))
        jobs = [
            DPFlowDataLoader(
                dataset,
                4,
                shuffle=True,
                num_workers=2,
                collate_fn=list,
                flow=f"test/ahead-{is_far}",
                address=common_cluster.address,
                job=JobOptions(idle_s=3.0, reconnect_timeout_s=PATIENCE_S),
            )
            for _ in range(2)
        ]
        with closing(DatasetReader(stored)) as plain:
            expected = sorted(map(repr, plain))
        seen = 0
        for _ in range(2):
            since = len(oss.requests)
            pairs = [*zip(*jobs, strict=True)]
            for job in range(2):
                assert sorted(repr(one) for pair in pairs for one in pair[job]) == expected
            rest = rest_of(stored, pool)
            # How many are read by two workers, as one takes over what the other had begun with, and how many of the
            # epoch before are still there, depends on the machine's load; but no job reads by itself.
            assert reads(oss, since).total() < 2 * rest
            assert len(ahead) > seen
            seen = len(ahead)


def test_two_readers_of_one_order_share_each_fetch(oss: OSSServer, stored: StoredDataset, pool: DataServer) -> None:
    with pooled(stored, pool) as one, pooled(stored, pool) as other:
        since = len(oss.requests)
        pairs = zip(
            loader_of(one, 0, torch.Generator().manual_seed(1)),
            loader_of(other, 0, torch.Generator().manual_seed(1)),
        )
        assert all(mine == yours for mine, yours in pairs)
        rest = rest_of(stored, pool)
        assert reads(oss, since).total() <= rest * 1.2


@pytest.mark.parametrize("wrapped", ["cache", "subset", "staged"])
def test_the_order_goes_through_datasets_around_it(
    oss: OSSServer, stored: StoredDataset, pool: DataServer, wrapped: str
) -> None:
    with pooled(stored, pool) as dataset:
        around: Any = {
            "cache": lambda: ALSDCache(dataset, 10),
            "subset": lambda: Subset(dataset, [*range(0, COUNT, 2)]),
            "staged": lambda: StagedDataset(ALSDCache(dataset, 10), [], "flow"),
        }[wrapped]()
        for seed in range(2):
            epoch(around, seed=seed)
        assert dataset.misses == 0


def test_what_is_held_for_readers_that_skip_samples_is_given_up(stored: StoredDataset, pool: DataServer) -> None:
    with pooled(stored, pool) as dataset:
        order = np.arange(COUNT)
        dataset.announce_order(lambda: order, 8)
        for number in range(0, COUNT, 40):
            dataset.read(number)
        (reading,) = pool._holdings.ahead._readings.values()
        # What has a place in memory tells the server nothing of how far the reader is.
        for number in np.flatnonzero(reading._may_read)[-4:].tolist():
            assert dataset.read(number)[0] == CONTENTS[number]
        assert dataset.misses == 0
        # What is on its way when it is given up keeps its room until it arrives.
        wait(lambda: reading._machine.used <= 8 * 1000, what="the end of what was given up")


def test_memory_is_free_when_the_reader_ends(stored: StoredDataset, pool: DataServer) -> None:
    with pooled(stored, pool) as dataset:
        iterator = iter(loader_of(dataset, 0, torch.Generator()))
        next(iterator)
        (reading,) = pool._holdings.ahead._readings.values()
        assert reading._machine.used
    wait(lambda: pool._holdings.ahead._left == AHEAD, what="the end of reading ahead")
    wait(lambda: not reading._space.used and not reading._machine.used, what="its samples")


def test_a_server_that_is_killed_in_an_epoch_costs_no_sample(stored: StoredDataset, tmp_path: Path) -> None:
    more = ("--ahead-memory", f"{AHEAD}B")
    with closing(DatasetReader(stored)) as plain:
        expected = digest(epoch(plain, seed=2))
    with (
        server(tmp_path / "p", f"{HALF}B", more=more) as process,
        closing(PooledDataset(stored, tmp_path / "p", silence_s=PATIENCE_S)) as dataset,
    ):
        DataClient(tmp_path / "p", silence_s=PATIENCE_S).preload(stored, fit="part")
        batches = []
        for number, batch in enumerate(loader_of(dataset, 2, torch.Generator().manual_seed(2))):
            batches.append(batch)
            if number == 8:
                os.kill(process.pid, signal.SIGKILL)
        assert digest(batches) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_resumed_from_its_state_is_the_same(
    stored: StoredDataset, pool: DataServer, workers: int
) -> None:
    with pooled(stored, pool) as dataset, closing(DatasetReader(stored)) as plain:
        expected = digest(epoch(plain, seed=3))
        loader = loader_of(dataset, workers, torch.Generator().manual_seed(3))
        begun = iter(loader)
        batches = [next(begun) for _ in range(7)]
        state = loader.state_dict()
        del begun
        again = loader_of(dataset, workers, torch.Generator())
        again.load_state_dict(state)
        assert digest([*batches, *again]) == expected
        if not workers:
            assert dataset.misses == 0
