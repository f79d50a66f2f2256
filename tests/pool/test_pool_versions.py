"""Versions of a stored dataset hold what they have in common once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow import PooledDataset
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.errors import PoolFullError
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Samples of both versions, in shards of four: of the first one's three, the second has two and adds two.
FIRST, SECOND = 10, 16
ROOM = 1 << 20


@pytest.fixture
def versions(store: DatasetStore) -> tuple[StoredDataset, StoredDataset]:
    first = publish(store, Numbered(FIRST))
    more = Numbered(SECOND - FIRST, first=FIRST)
    return first, publish(store, more, version="v2", parent="v1", shard_size=None)


def free_at(address: Path) -> int:
    with PoolConnection(address, silence_s=PATIENCE_S) as connection:
        return connection.contents().free


def servers_at(address: Path) -> int:
    with PoolConnection(address, silence_s=PATIENCE_S) as connection:
        return len(connection.servers())


def unlink_data(stored: StoredDataset) -> None:
    for url in {stored.data_url(one) for one in stored.samples()}:
        Path(url.removeprefix("file://")).unlink()


def reserved(folder: Path, *sets: StoredDataset) -> list[int]:
    """What each takes in a pool, one after the other."""
    with inner_server(folder, ROOM), closing(DataClient(folder, silence_s=PATIENCE_S)) as client:
        return [client.preload(one).reserved_bytes for one in sets]


def test_a_further_version_takes_room_for_what_it_adds(
    versions: tuple[StoredDataset, StoredDataset], tmp_path: Path
) -> None:
    first, second = versions
    alone = reserved(tmp_path / "alone", second)[0]
    address = tmp_path / "p"
    with inner_server(address, ROOM), closing(DataClient(address, silence_s=PATIENCE_S)) as client:
        older, newer = client.preload(first), client.preload(second)
        assert (newer.loaded, newer.failed) == (SECOND, 0)
        assert newer.reserved_bytes < alone - older.reserved_bytes / 2
        assert free_at(address) == ROOM - older.reserved_bytes - newer.reserved_bytes
        unlink_data(second)
        with closing(PooledDataset(second, address, silence_s=PATIENCE_S)) as dataset:
            assert dataset.__getitems__([*range(SECOND)]) == numbers(SECOND)
            client.unload(first)
            assert [one.ref for one in client.cached_datasets()] == ["core/numbers:v2:train"]
            assert dataset.__getitems__([*range(SECOND)]) == numbers(SECOND)
            assert dataset.hits == 2 * SECOND
        # What it still shares stays, and counts.
        assert free_at(address) == ROOM - older.reserved_bytes - newer.reserved_bytes
        with closing(PooledDataset(second, address, silence_s=PATIENCE_S)) as dataset:
            assert dataset.__getitems__([*range(SECOND)]) == numbers(SECOND)
        client.unload(second)
        assert free_at(address) == ROOM


def test_the_room_of_a_further_version_is_what_it_adds(
    versions: tuple[StoredDataset, StoredDataset], tmp_path: Path
) -> None:
    first, second = versions
    sizes = reserved(tmp_path / "sizes", first, second)
    for short, address in enumerate([tmp_path / "p", tmp_path / "q"]):
        with (
            inner_server(address, sum(sizes) - short),
            closing(DataClient(address, silence_s=PATIENCE_S)) as client,
        ):
            client.preload(first)
            if not short:
                assert client.preload(second).loaded == SECOND
                assert free_at(address) == 0
                continue
            with pytest.raises(PoolFullError, match=f"the dataset takes {sizes[1]:,} bytes"):
                client.preload(second)
            part = client.preload(second, fit="part")
            assert 0 < part.loaded < SECOND
            assert [one.loaded for one in client.cached_datasets()] == [FIRST, part.loaded]
            assert client.read_batch(second, [*range(SECOND)]) == numbers(SECOND)


def test_what_an_older_version_could_not_read_is_read_anew(
    versions: tuple[StoredDataset, StoredDataset], tmp_path: Path
) -> None:
    first, second = versions
    places = [*first.samples()]
    pack = Path(first.data_url(places[5]).removeprefix("file://"))
    content = pack.read_bytes()
    assert places[5].offset
    pack.write_bytes(content[: places[5].offset])
    address = tmp_path / "p"
    with inner_server(address, ROOM), closing(DataClient(address, silence_s=PATIENCE_S)) as client:
        assert 0 < client.preload(first, on_error="skip").failed < FIRST
        pack.write_bytes(content)
        info = client.preload(second)
        assert (info.loaded, info.failed) == (SECOND, 0)
        unlink_data(second)
        assert client.read_batch(second, [*range(SECOND)]) == numbers(SECOND)


def test_where_a_pool_has_several_servers_each_version_is_held_by_itself(
    versions: tuple[StoredDataset, StoredDataset], tmp_path: Path
) -> None:
    head, member = tmp_path / "p", tmp_path / "q"
    alone = reserved(tmp_path / "alone", versions[1])[0]
    with (
        inner_server(head, ROOM),
        inner_server(member, ROOM, join=head),
        closing(DataClient(head, silence_s=PATIENCE_S)) as client,
    ):
        wait(lambda: servers_at(head) == 2)
        client.preload(versions[0])
        assert client.preload(versions[1]).reserved_bytes == alone
        unlink_data(versions[1])
        assert client.read_batch(versions[1], [*range(SECOND)]) == numbers(SECOND)
