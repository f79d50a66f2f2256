"""Servers that fall silent in the midst of a record: what they owe is read elsewhere, and nothing else suffers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.shared_cluster import PATIENCE_S
from torch_dpflow.dataservice.lanes import lane_reader
from torch_dpflow.dataservice.lanes.guards import admit_stream, guard_of
from torch_dpflow.dataservice.lanes.lane_reader import LaneReader
from torch_dpflow.dataservice.lanes.pool_address import find_address
from torch_dpflow.dataservice.lanes.wire import DATA, pack_answer, take_request
from torch_dpflow.dataservice.planning.window import FixedWindow
from torch_dpflow.remote.access.connection_file import generate_keys, write_connection_file

IDENTITY, RECORD_BYTES = bytes(16), 1000


class HaltingServer:
    """Answers each request with records of zeros, and each connection with so many bytes; then with nothing.

    most_bytes: of the first connection, of the second and so on; of those that follow, any number.
    """

    def __init__(self, keys: Path, *most_bytes: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._most_bytes = iter(most_bytes)
        host, port = self._listening.getsockname()
        self.address = find_address(f"tcp://{host}:{port}", keys, trust_network=True)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            admission = admit_stream(connection, guard_of(self.address, serves=True))
            while True:
                try:
                    next(admission)
                except StopIteration as end:
                    self._threads.append(threading.Thread(target=self._answer, args=(end.value[0],)))
                    self._threads[-1].start()
                    break

    def _answer(self, connection: socket.socket) -> None:
        left, incoming = next(self._most_bytes, 1 << 40), bytearray()
        with connection:
            while more := connection.recv(1 << 16):
                incoming += more
                while (request := take_request(incoming)) is not None:
                    entries = [(record, RECORD_BYTES) for record in request.records]
                    answer = pack_answer(DATA, IDENTITY, entries) + bytes(RECORD_BYTES * len(entries))
                    connection.sendall(answer[:left])
                    left -= min(left, len(answer))

    def close(self) -> None:
        """End it; whoever is connected has to be gone."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_connection_file(tmp_path / "keys", generate_keys(""))
    return tmp_path / "keys"


@contextmanager
def reading(server: HaltingServer, silence_s: float, window: int) -> Iterator[LaneReader]:
    with closing(server), closing(LaneReader(server.address, silence_s, FixedWindow(window))) as reader:
        yield reader


def test_a_server_lost_in_the_midst_of_a_record_leaves_the_window_free(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_reader, "_FIRST_PAUSE_S", 0.0)
    with reading(HaltingServer(keys, RECORD_BYTES // 2), 0.05, RECORD_BYTES) as reader:
        wanted = [str(reader._pool)], [0], [RECORD_BYTES]
        assert reader.read(IDENTITY, *wanted) == [None]
        reader._silence_s = PATIENCE_S
        assert reader.read(IDENTITY, *wanted) == [bytes(RECORD_BYTES)]
