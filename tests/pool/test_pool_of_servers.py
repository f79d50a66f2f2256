"""Several servers in one pool: each holds a part, readers map all of them, and any of them may go and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S, wait
from tests.support.oss_server import OSSServer
from torch_dpflow import PooledDataset
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.errors import OptionError, StorageUnavailableError, UsageError
from torch_dpflow.pool import CachedDataset, DataClient, DataServer
from torch_dpflow.pool.messages import (
    DatasetPart,
    DatasetSource,
    DropDataset,
    FollowerHeartbeat,
    Instructions,
    JoinPool,
    ServerInfo,
)
from torch_dpflow.pool.planning.layout import ALL
from torch_dpflow.pool.server.holdings import Holdings
from torch_dpflow.pool.sources import identity_of, source_of
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.control_connection import PoolConnection

COUNT = 200
#: How long readers wait for a server that is frozen, seconds: what they do not get, they read from storage.
FROZEN_S = 2.0


@pytest.fixture
def stored(store: DatasetStore) -> StoredDataset:
    return publish(store, Numbered(COUNT), shard_size=10)


def servers_of(address: Path) -> int:
    with PoolConnection(address) as connection:
        return len(connection.servers())


def wait_for_servers(address: Path, count: int) -> None:
    wait(lambda: servers_of(address) == count, what=f"{count} servers")


@contextmanager
def inner_pool(folder: Path, *memories: int, **options: float) -> Iterator[list[DataServer]]:
    """Servers in threads, once all have joined; the first is the leader."""
    leader = folder / "s0"
    with ExitStack() as stack:
        yield [
            stack.enter_context(inner_server(leader, memories[0], **options)),
            *(
                stack.enter_context(inner_server(folder / f"s{number}", memory, join=leader, **options))
                for number, memory in enumerate(memories[1:], 1)
            ),
        ]


@contextmanager
def pool(folder: Path, count: int, memory: str = "1MiB") -> Iterator[list[subprocess.Popen[str]]]:
    """Servers in processes, once all have joined; the first is the leader."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(server(folder / f"s{number}", memory, folder / "s0" if number else None))
            for number in range(count)
        ]
        wait_for_servers(folder / "s0", count)
        yield processes


def info_of(stored: StoredDataset, address: Path) -> CachedDataset | None:
    found = [one for one in DataClient(address).cached_datasets() if one.identity == identity_of(stored)]
    return found[0] if found else None


def loaded_of(stored: StoredDataset, address: Path) -> int:
    info = info_of(stored, address)
    return 0 if info is None else info.loaded


def is_loaded(stored: StoredDataset, address: Path) -> bool:
    info = info_of(stored, address)
    return info is not None and info.is_placed and info.loaded == COUNT


def remove_data(stored: StoredDataset) -> None:
    for url in {stored.data_url(one) for one in stored.samples()}:
        Path(url.removeprefix("file://")).unlink()


def test_a_set_larger_than_each_server_is_read_from_the_memory_of_all(stored: StoredDataset, tmp_path: Path) -> None:
    with inner_pool(tmp_path, 8 << 10, 8 << 10, 16 << 10):
        wait_for_servers(tmp_path / "s0", 3)
        client = DataClient(tmp_path / "s1", silence_s=PATIENCE_S)  # a follower is as good as the leader
        info = client.preload(stored)
        assert (info.placed, info.loaded, info.failed) == (COUNT, COUNT, 0)
        remove_data(stored)
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
        assert client.dataset(stored).hits == COUNT
        with PoolConnection(tmp_path / "s0") as connection:
            servers = connection.servers()
            found = {Path(one.directory).name: one.memory for one in servers}
            assert found == {"s0": 8 << 10, "s1": 8 << 10, "s2": 16 << 10}
            assert all(0 <= one.free < one.memory for one in servers)
            assert connection.contents().capacity == 32 << 10
        client.close()


def test_each_server_reads_its_own_part_of_storage(tmp_path: Path) -> None:
    with OSSServer() as oss, inner_pool(tmp_path, *[64 << 10] * 4):
        wait_for_servers(tmp_path / "s0", 4)
        oss.buckets.create("bucket")
        store = DatasetStore.create("oss://bucket/datasets", **oss.storage_options())
        stored = publish(store, Numbered(COUNT), shard_size=10)
        data = {stored.data_url(one).removeprefix("oss://bucket/") for one in stored.samples()}
        with closing(DataClient(tmp_path / "s2", silence_s=PATIENCE_S)) as client:
            first = len(oss.requests)
            client.preload(stored)
            assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
            asked = Counter(one.key for one in oss.requests[first:] if one.method == "GET" and one.key in data)
            assert asked.keys() == data
        for files in (store.files, stored.files):
            files.close()
            files.filesystem._session.session.close()


def test_commands_show_servers(stored: StoredDataset, tmp_path: Path) -> None:
    with inner_pool(tmp_path, 64 << 10, 64 << 10):
        wait_for_servers(tmp_path / "s0", 2)
        DataClient(tmp_path / "s0").preload(stored)
        listed = CliRunner().invoke(root, ["pool", "list", "--address", str(tmp_path / "s1")], env={"COLUMNS": "200"})
        assert listed.exit_code == 0, listed.output
        assert str(tmp_path / "s0") in listed.output
        assert str(tmp_path / "s1") in listed.output


def test_stripes_of_a_killed_follower_are_read_again_by_those_with_room(stored: StoredDataset, tmp_path: Path) -> None:
    with pool(tmp_path, 3) as processes, closing(DataClient(tmp_path / "s1", silence_s=PATIENCE_S)) as client:
        client.preload(stored)
        assert client.read(stored, 0) == numbers(1)[0]
        with closing(PooledDataset(stored, tmp_path / "s2", silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(COUNT // 2)) == numbers(COUNT)[: COUNT // 2]
            os.kill(processes[1].pid, signal.SIGKILL)
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            wait_for_servers(tmp_path / "s0", 2)
            wait(lambda: is_loaded(stored, tmp_path / "s0"), what="the others")
            remove_data(stored)
            wait(lambda: all(isinstance(one, tuple) for one in dataset.read_each(range(COUNT))))
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)  # whose own server is gone


def test_reads_go_on_without_a_leader_and_a_new_one_learns_what_followers_hold(
    stored: StoredDataset, tmp_path: Path
) -> None:
    with pool(tmp_path, 2) as processes:
        with closing(DataClient(tmp_path / "s1", silence_s=PATIENCE_S)) as client:
            client.preload(stored)
            assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
        os.kill(processes[0].pid, signal.SIGKILL)
        processes[0].wait()
        with closing(PooledDataset(stored, tmp_path / "s1", silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            held = dataset.hits
            assert 0 < held < COUNT  # what the follower has
            remove_data(stored)
            with server(tmp_path / "s0", "1MiB"):
                wait_for_servers(tmp_path / "s0", 2)
                wait(lambda: info_of(stored, tmp_path / "s0") is not None, what="the set")
                wait(lambda: dataset.read_each([*range(COUNT)]) and dataset.hits >= 2 * held, what="hits")
                wait(lambda: loaded_of(stored, tmp_path / "s0") == held, what="what the follower holds")
                info = info_of(stored, tmp_path / "s0")
                assert info is not None
                assert info.is_explicit


@pytest.mark.slow
def test_a_command_through_a_follower_waits_for_a_leader_that_is_late(stored: StoredDataset, tmp_path: Path) -> None:
    with pool(tmp_path, 2) as processes:
        os.kill(processes[0].pid, signal.SIGSTOP)
        late = threading.Timer(3.0, os.kill, (processes[0].pid, signal.SIGCONT))
        late.start()
        info = DataClient(tmp_path / "s1", silence_s=PATIENCE_S).preload(stored)
        late.join()
        assert info.loaded == COUNT


@pytest.mark.slow
def test_a_reader_that_asks_a_new_leader_before_its_followers_have_come_back_changes_no_part(
    stored: StoredDataset, tmp_path: Path
) -> None:
    with pool(tmp_path, 2, "12KiB") as processes:
        with closing(DataClient(tmp_path / "s0", silence_s=PATIENCE_S)) as client:
            client.preload(stored)  # one server alone has no room for it
        os.kill(processes[1].pid, signal.SIGSTOP)
        os.kill(processes[0].pid, signal.SIGKILL)
        processes[0].wait()
        with (
            server(tmp_path / "s0", "12KiB"),
            closing(PooledDataset(stored, tmp_path / "s0", silence_s=PATIENCE_S)) as dataset,
        ):
            assert dataset[0] == numbers(1)[0]
            wait(lambda: info_of(stored, tmp_path / "s0") is not None, what="the set")
            os.kill(processes[1].pid, signal.SIGCONT)
            wait(lambda: is_loaded(stored, tmp_path / "s0"), what="all of it")


def test_a_preload_waits_for_followers_of_a_leader_that_was_killed(
    stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dpflow.pool.server.leader.LEASE_S", 0.5)
    (tmp_path / "p").mkdir(mode=0o700)
    (tmp_path / "p" / "followers").write_text("host:/run/pool/1\n")  # they do not come
    with (
        inner_server(tmp_path / "p", 1 << 20),
        closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as client,
    ):
        assert client.preload(stored).loaded == COUNT


def test_a_follower_that_comes_back_with_another_part_gives_it_up(stored: StoredDataset, tmp_path: Path) -> None:
    identity = identity_of(stored)
    with inner_server(tmp_path / "s0", 1 << 20), PoolConnection(tmp_path / "s0") as connection:
        DataClient(tmp_path / "s0", silence_s=PATIENCE_S).preload(stored)
        source = source_of(stored, None)
        connection.request(DatasetPart(source=source, identity=identity, is_explicit=True, cut=7, stripes=[0]))
        (leader,) = connection.servers()
        connection.request(JoinPool(msgspec.structs.replace(leader, directory=str(tmp_path / "s1"))))
        orders, _ = connection.request(FollowerHeartbeat(states=[], wait_s=0.0))
        assert isinstance(orders, Instructions)
        assert [one.identity for one in orders.instructions if isinstance(one, DropDataset)] == [identity]


def test_of_a_stripe_that_no_server_has_room_for_a_part_is_held(tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "datasets"))
    stored = publish(store, Numbered(COUNT), shard_size=COUNT)
    with inner_pool(tmp_path, 8 << 10, 8 << 10):
        wait_for_servers(tmp_path / "s0", 2)
        with closing(DataClient(tmp_path / "s0", silence_s=PATIENCE_S)) as client:
            info = client.preload(stored, fit="part")
            assert COUNT // 4 < info.loaded == info.placed < COUNT
            assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)


@pytest.mark.slow
def test_a_frozen_follower_is_given_up_and_joins_again(stored: StoredDataset, tmp_path: Path) -> None:
    with pool(tmp_path, 3) as processes, closing(DataClient(tmp_path / "s0", silence_s=FROZEN_S)) as client:
        client.preload(stored)
        os.kill(processes[1].pid, signal.SIGSTOP)
        wait_for_servers(tmp_path / "s0", 2)
        wait(lambda: is_loaded(stored, tmp_path / "s0"), what="the others")
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
        os.kill(processes[1].pid, signal.SIGCONT)
        wait_for_servers(tmp_path / "s0", 3)
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
        os.kill(processes[0].pid, signal.SIGSTOP)
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
        with closing(PooledDataset(stored, tmp_path / "s2", silence_s=FROZEN_S)) as dataset:
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
        os.kill(processes[0].pid, signal.SIGCONT)
        wait_for_servers(tmp_path / "s0", 3)
        wait(lambda: is_loaded(stored, tmp_path / "s0"), what="the set")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_goes_while_a_set_is_preloaded(
    stored: StoredDataset, tmp_path: Path, number: signal.Signals
) -> None:
    with pool(tmp_path, 3) as processes, closing(DataClient(tmp_path / "s0", silence_s=FROZEN_S)) as client:
        gone = list[int]()

        def lose(info: CachedDataset) -> None:
            if not gone:
                gone.append(processes[2].pid)
                os.kill(processes[2].pid, number)

        info = client.preload(stored, progress=lose)
        assert (info.placed, info.loaded) == (COUNT, COUNT)
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)


def test_a_follower_that_begins_anew_at_its_address_is_empty(stored: StoredDataset, tmp_path: Path) -> None:
    with (
        inner_server(tmp_path / "s0", 1 << 20),
        closing(PooledDataset(stored, tmp_path / "s0", silence_s=PATIENCE_S)) as dataset,
    ):
        for _ in range(2):
            with inner_server(tmp_path / "s1", 1 << 20, join=tmp_path / "s0"):
                wait_for_servers(tmp_path / "s0", 2)
                DataClient(tmp_path / "s0").preload(stored)
                assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            wait_for_servers(tmp_path / "s0", 1)
        wait(lambda: is_loaded(stored, tmp_path / "s0"), what="the set")
        assert dataset.read_each(range(COUNT)) == numbers(COUNT)


@pytest.mark.slow  # a read of a storage that is away is tried for two minutes
def test_a_server_ends_at_once_though_a_storage_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends, which the check after each test awaits."""
    monkeypatch.setattr("torch_dpflow.pool.server.holdings.FIRST_PAUSE_S", 1e6)
    monkeypatch.setattr("torch_dpflow.pool.server.holdings.MAX_PAUSE_S", 1e6)

    def unavailable(*_: object) -> None:
        raise StorageUnavailableError("down")

    monkeypatch.setattr("torch_dpflow.pool.server.holdings.open_source", unavailable)
    source = DatasetSource(store="oss://bucket/datasets", options={}, ref="core/numbers:v1:train")
    holdings, identity = Holdings(0), bytes(16)
    holdings.apply(DatasetPart(source=source, identity=identity, is_explicit=False, cut=ALL, stripes=[0]))
    wait(lambda: holdings.state(identity).error, what="that its metadata cannot be read")
    holdings.close()


def test_who_is_no_leader_takes_no_followers(tmp_path: Path) -> None:
    with inner_pool(tmp_path, 1 << 20, 1 << 20):
        wait_for_servers(tmp_path / "s0", 2)
        with (
            PoolConnection(tmp_path / "s1") as connection,
            pytest.raises(UsageError, match="join its leader, at"),
        ):
            connection.request(JoinPool(connection.servers()[0]))
        with PoolConnection(tmp_path / "s0") as connection, pytest.raises(UsageError, match="join before"):
            connection.request(FollowerHeartbeat(states=[], wait_s=0.0))
        with pytest.raises(OptionError, match="this server itself"):
            DataServer(1 << 20, tmp_path / "s2", join=tmp_path / "s2")
        with pytest.raises(OptionError, match="runs at"):
            DataServer(1 << 20, tmp_path / "s0")


def test_a_follower_joins_over_the_network_and_hosts_read_from_each_other(
    stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    assert CliRunner().invoke(root, ["keygen", str(keys)]).exit_code == 0
    listen = find_address("tcp://127.0.0.1:0", keys)
    with inner_server(tmp_path / "s0", 1 << 20, listen=listen) as leader:
        address = find_address(str(leader.address), keys)
        with inner_server(tmp_path / "s1", 1 << 20, listen=listen, join=address):
            wait_for_servers(tmp_path / "s0", 2)
            DataClient(address, silence_s=PATIENCE_S).preload(stored)
            remove_data(stored)
            monkeypatch.setattr(ServerInfo, "is_near", False)  # as on a third host
            with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
                assert dataset.read_each(range(COUNT)) == numbers(COUNT)
                assert (dataset.hits, dataset.misses) == (COUNT, 0)


def test_a_reader_whose_own_server_goes_reads_from_the_others_where_these_are(
    stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_connection_file(tmp_path / "keys.json", generate_keys("", certificates=True))
    keys = tmp_path / "keys.json"
    listen = find_address("tcp://127.0.0.1:0", keys)
    monkeypatch.setattr(ServerInfo, "is_near", False)  # as on a third host
    with inner_server(tmp_path / "s0", 1 << 20, listen=listen) as leader, ExitStack() as later:
        join = find_address(str(leader.address), keys)
        with inner_server(tmp_path / "s1", 1 << 20, listen=listen, join=join) as follower:
            wait_for_servers(tmp_path / "s0", 2)
            DataClient(join, silence_s=PATIENCE_S).preload(stored)
            own = find_address(str(follower.address), keys)
            dataset = later.enter_context(closing(PooledDataset(stored, own, silence_s=PATIENCE_S)))
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            assert dataset.hits == COUNT

        def are_in_memory() -> bool:
            misses = dataset.misses
            return dataset.read_each(range(COUNT)) == numbers(COUNT) and dataset.misses == misses

        wait(are_in_memory, what="all from the other server")
