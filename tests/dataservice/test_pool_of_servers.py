"""Several servers in one pool: each holds a part, readers map all of them, and any of them may go and come back."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.oss_server import OSSServer
from tests.dataservice.pool_servers import inner_server, server
from tests.datasets.samples_source import Numbered, numbers, publish
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow.cli.main import root
from torch_dpflow.dataservice import DataClient, DataServer
from torch_dpflow.dataservice.pool_connection import PoolConnection
from torch_dpflow.datasets import DatasetStore, StoredDataset

COUNT = 200


@pytest.fixture
def stored(tmp_path: Path) -> StoredDataset:
    return publish(DatasetStore.create(str(tmp_path / "datasets")), Numbered(COUNT), shard_size=10)


def servers_of(address: Path) -> int:
    with PoolConnection(address) as connection:
        return len(connection.servers())


def wait_for_servers(address: Path, count: int) -> None:
    wait(lambda: servers_of(address) == count, what=f"{count} servers")


@contextmanager
def inner_pool(folder: Path, *memories: int, **options: float) -> Iterator[list[DataServer]]:
    """Servers in threads, once all have joined; the first is the head."""
    head = folder / "s0"
    with ExitStack() as stack:
        yield [
            stack.enter_context(inner_server(head, memories[0], **options)),
            *(
                stack.enter_context(inner_server(folder / f"s{number}", memory, join=head, **options))
                for number, memory in enumerate(memories[1:], 1)
            ),
        ]


@contextmanager
def pool(folder: Path, count: int, memory: str = "1MiB") -> Iterator[list[subprocess.Popen[str]]]:
    """Servers in processes, once all have joined; the first is the head."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(server(folder / f"s{number}", memory, folder / "s0" if number else None))
            for number in range(count)
        ]
        wait_for_servers(folder / "s0", count)
        yield processes


def remove_data(stored: StoredDataset) -> None:
    for url in {stored.data_url(one) for one in stored.samples()}:
        Path(url.removeprefix("file://")).unlink()


def test_a_set_larger_than_each_server_is_read_from_the_memory_of_all(
    stored: StoredDataset, tmp_path: Path
) -> None:
    with inner_pool(tmp_path, 8 << 10, 8 << 10, 16 << 10):
        wait_for_servers(tmp_path / "s0", 3)
        client = DataClient(tmp_path / "s1", silence_s=PATIENCE_S)  # a member is as good as the head
        info = client.preload(stored)
        assert (info.placed, info.loaded, info.failed) == (COUNT, COUNT, 0)
        remove_data(stored)
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
        assert client.dataset(stored).hits == COUNT
        with PoolConnection(tmp_path / "s0") as connection:
            servers = connection.servers()
            assert [one.memory for one in servers] == [8 << 10, 8 << 10, 16 << 10]
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
            asked = Counter(
                one.key for one in oss.requests[first:] if one.method == "GET" and one.key in data
            )
            assert asked.keys() == data
        for files in (store.files, stored.files):
            files.close()
            files.filesystem._session.session.close()


def test_commands_show_servers(stored: StoredDataset, tmp_path: Path) -> None:
    with inner_pool(tmp_path, 64 << 10, 64 << 10):
        wait_for_servers(tmp_path / "s0", 2)
        DataClient(tmp_path / "s0").preload(stored)
        listed = CliRunner().invoke(
            root, ["pool", "list", "--address", str(tmp_path / "s1")], env={"COLUMNS": "200"}
        )
        assert listed.exit_code == 0, listed.output
        assert str(tmp_path / "s0") in listed.output
        assert str(tmp_path / "s1") in listed.output
