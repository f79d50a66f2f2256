"""Clients of the pool that fork or are killed while they read, and data that is not what it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.datasets.samples_source import numbers, publish
from tests.interruption import Interruption
from tests.new_process import in_fork
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow import PooledDataset
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.errors import ChecksumError, StorageError
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.authentication import authenticator_for, connect_stream, receive_exactly
from torch_dpflow.pool.transport.data_frames import DATA_CONNECTION, WHOLE, RecordRequest

COUNT, LARGE = 40, 8 << 20


def read_in_child(client: DataClient, stored: StoredDataset, end: Connection) -> None:
    end.send((client.read_batch(stored, range(COUNT)), client.dataset(stored).misses))


def test_a_process_that_is_forked_after_reading_reads_by_connections_of_its_own(
    stored: StoredDataset, client: DataClient
) -> None:
    client.preload(stored)
    assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(client, stored, theirs))
    child.start()
    for _ in range(20):  # while the child reads
        assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)
    assert ours.poll(PATIENCE_S)
    assert ours.recv() == (numbers(COUNT), 0)
    child.join()
    child.close()
    for one in (ours, theirs):
        one.close()
    assert client.dataset(stored).misses == 0


def interrupt_reads(stored: StoredDataset, address: Path) -> int:
    """Interrupt a read at every ninth place, and read all after each; how many were interrupted."""
    interrupted = 0
    with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
        for place in range(0, 900, 9):
            dataset.close()  # so that it asks what there is
            try:
                with Interruption(place):
                    dataset.read_each(range(5))
            except KeyboardInterrupt:
                interrupted += 1
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
    return interrupted


def test_a_read_that_is_interrupted_anywhere_leaves_the_next_one_right(
    stored: StoredDataset, client: DataClient, tmp_path: Path
) -> None:
    client.preload(stored)
    # Another process, as what has come and has no owner yet goes with that.
    assert in_fork(interrupt_reads, stored, tmp_path / "p") > 40


def test_data_that_was_replaced_is_told_to_who_compares(stored: StoredDataset, tmp_path: Path) -> None:
    pack = Path(stored.data_url(stored.sample(0)).removeprefix("file://"))
    pack.write_bytes(bytes(len(pack.read_bytes())))
    with inner_server(tmp_path / "p", 1 << 20):
        with pytest.raises(StorageError, match="do not match"):
            DataClient(tmp_path / "p", silence_s=PATIENCE_S).preload(stored)
        with closing(PooledDataset(stored, tmp_path / "p", check=True, silence_s=PATIENCE_S)) as dataset:
            found = dataset.read_each(range(COUNT))
    is_wrong = [isinstance(one, ChecksumError) for one in found]
    assert any(is_wrong)
    assert all(wrong or one == right for wrong, one, right in zip(is_wrong, found, numbers(COUNT)))


def receive_a_part(file: Path, address: str, identity: bytes, end: Connection) -> None:
    found = find_address(address, file)
    connection = connect_stream(found, authenticator_for(found, serves=False), DATA_CONNECTION, PATIENCE_S)
    connection.sendall(RecordRequest(identity, [(0, 0, WHOLE)]).pack())
    receive_exactly(connection, 100)
    end.send(None)
    signal.pause()


def test_a_reader_that_is_killed_while_it_receives_costs_others_nothing(tmp_path: Path) -> None:
    large = [(os.urandom(LARGE), {"number": number}) for number in range(2)]
    stored = publish(DatasetStore.create(str(tmp_path / "datasets")), large)
    write_connection_file(tmp_path / "keys", generate_keys("", certificates=True))
    listen = find_address("tcp://127.0.0.1:0", tmp_path / "keys")
    with inner_server(tmp_path / "p", 4 * LARGE, listen=listen) as serving:
        (tmp_path / "p").rename(tmp_path / "q")  # so that nobody maps its memory
        address = find_address(str(serving.address), tmp_path / "keys")
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=receive_a_part,
            args=(tmp_path / "keys", str(serving.address), identity_of(stored), theirs),
        )
        child.start()
        assert ours.poll(PATIENCE_S)
        with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
            assert dataset[0] == large[0]
            child.kill()
            child.join()
            child.close()
            assert dataset.read_each(range(2)) == large
    for one in (ours, theirs):
        one.close()
