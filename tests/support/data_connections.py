"""Contract suite of data connections: subclass `DataConnectionContract`, and say how the server is reached.

::

    class TestMyLane(DataConnectionContract):
        def listener(self, tmp_path):
            return find_address("tcp://127.0.0.1:0", tmp_path / "keys")
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.pool import DataServer
from torch_dpflow.pool.reader.pool_reader import PoolReader
from torch_dpflow.pool.sources import identity_of, source_of
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Time limit for whatever a test awaits, seconds.
PATIENCE_S = 60.0
_MEMORY = 64 << 20
#: Bytes of the records, in turns: none, one, about a cache line, about what is sent in a turn and received at once.
SIZES = (0, 1, 63, 64, 65, 5_000, 20_000, 1_048_576, 1_048_577, 1_100_000)


class _Contents(Sequence[tuple[bytes, dict[str, int]]]):
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> tuple[bytes, dict[str, int]]:  # type: ignore[override]
        return content_of(index, self._sizes[index]), {"number": index}


def content_of(index: int, size: int) -> bytes:
    """The bytes of a record, which tell its number."""
    return (b"%d." % index * (1 + size // 2))[:size]


class DataConnectionContract:
    """Contract of data connections: return the bytes of each record in the server's memory, of any number and size."""

    def listen(self, tmp_path: Path) -> PoolAddress | None:
        """Where the server listens for other hosts; None: readers map its memory."""
        raise NotImplementedError(f"{type(self).__name__} must say how its server is reached")

    # --- fixtures ---

    @pytest.fixture
    def address(self, tmp_path: Path) -> Iterator[PoolAddress]:
        """Where a reader finds a server, in a thread."""
        listen = self.listen(tmp_path)
        server = DataServer(_MEMORY, tmp_path / "pool", listen=listen)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            if listen is None or server.address is None:
                yield PoolAddress(directory=server.directory)
            else:
                yield listen.at(server.address)
        finally:
            server.stop()
            thread.join()

    @pytest.fixture
    def publish(self, tmp_path: Path) -> Callable[[Sequence[int]], StoredDataset]:
        """Publish a dataset of records of these sizes."""

        def publish(sizes: Sequence[int]) -> StoredDataset:
            store = DatasetStore.create(str(tmp_path / "datasets"))
            draft = Draft(store, "lane/records", "v1")
            draft.add("all", IterableImporter(_Contents(sizes), name="records"), shard_size=7)
            draft.publish()
            return store.open("lane/records:v1:all")

        return publish

    # --- records ---

    def test_records_of_any_size_come_in_the_order_that_they_are_asked_for(
        self, address: PoolAddress, publish: Callable[[Sequence[int]], StoredDataset]
    ) -> None:
        sizes = SIZES * 3
        stored = publish(sizes)
        preload(address, stored)
        expected = [content_of(index, size) for index, size in enumerate(sizes)]
        backwards = [*range(len(sizes))][::-1]
        with closing(reading(address, stored)) as connection:
            assert connection.read(backwards, [sizes[one] for one in backwards]) == expected[::-1]
            assert connection.read(backwards) == expected[::-1]
            assert connection.read([]) == []
            assert connection.read([3] * 50) == [expected[3]] * 50
            assert connection.hits == 2 * len(sizes) + 50
            assert connection.misses == 0

    def test_records_that_are_not_copied_stay_as_they_are_while_more_are_read(
        self, address: PoolAddress, publish: Callable[[Sequence[int]], StoredDataset]
    ) -> None:
        sizes = SIZES * 3
        stored = publish(sizes)
        preload(address, stored)
        expected = [content_of(index, size) for index, size in enumerate(sizes)]
        held: list[list[bytes | memoryview]] = []
        with closing(reading(address, stored)) as connection:
            for _ in range(5):  # memory of the first is used again
                held = [*held[-1:], connection.read(range(len(sizes)), sizes, copy=False)]
                assert all(memoryview(one).readonly for one in held[-1])
                assert all([*map(bytes, found)] == expected for found in held)
            assert connection.misses == 0
        assert [*map(bytes, held[-1])] == expected

    def test_records_that_are_not_there_yet_are_waited_for(
        self, address: PoolAddress, publish: Callable[[Sequence[int]], StoredDataset]
    ) -> None:
        sizes = [100] * 200
        stored = publish(sizes)
        expected = [content_of(index, size) for index, size in enumerate(sizes)]
        loading = threading.Thread(target=preload, args=(address, stored))
        with closing(reading(address, stored)) as connection:
            loading.start()
            found = connection.read(range(len(sizes)))
            while None in found:  # until the server knows where they lie
                assert all(one in (None, wanted) for one, wanted in zip(found, expected))
                found = connection.read(range(len(sizes)))
        loading.join()
        assert found == expected

    def test_what_is_unloaded_is_not_there(
        self, address: PoolAddress, publish: Callable[[Sequence[int]], StoredDataset]
    ) -> None:
        stored = publish([10] * 20)
        preload(address, stored)
        with closing(reading(address, stored)) as connection:
            assert connection.read([0, 19]) == [content_of(0, 10), content_of(19, 10)]
            with PoolConnection(address) as pool:
                pool.unload(identity_of(stored))
            for _ in range(2):
                assert connection.read([0, 19]) == [None, None]

    def test_readers_do_not_wait_for_each_other(
        self, address: PoolAddress, publish: Callable[[Sequence[int]], StoredDataset]
    ) -> None:
        sizes = [30_000] * 40
        stored = publish(sizes)
        preload(address, stored)
        expected = [content_of(index, size) for index, size in enumerate(sizes)]
        connections = [reading(address, stored) for _ in range(4)]
        found: dict[int, list[bytes | None]] = {}

        def read(number: int) -> None:
            for _ in range(5):
                found[number] = connections[number].read(range(len(sizes)))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(len(connections))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()
        assert found == dict.fromkeys(range(len(connections)), expected)


def preload(address: PoolAddress, stored: StoredDataset) -> None:
    """Have all of it in memory."""
    with PoolConnection(address) as pool:
        pool.preload(source_of(stored, None), identity_of(stored), whole=True)


def reading(address: PoolAddress, stored: StoredDataset) -> PoolReader:
    """A reader; the caller closes it."""
    return PoolReader(address, source_of(stored, None), identity_of(stored), PATIENCE_S)
