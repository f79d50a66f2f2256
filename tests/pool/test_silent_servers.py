"""Servers that fall silent in the midst of a record: what they owe is read elsewhere, and nothing else suffers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.shared_cluster import PATIENCE_S
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.pool.planning.request_window import FixedWindow
from torch_dpflow.pool.transport import data_reader
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.authentication import accept_stream, authenticator_for
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_frames import DATA, MAX_RECORD_BYTES, pack_answer, take_request
from torch_dpflow.pool.transport.data_reader import DataReader

IDENTITY, RECORD_BYTES = bytes(16), 20_000


class HaltingServer:
    """Answers requests with records of zeros, and halts in the midst of each answer.

    halt: what it does there, told how many records were asked for; nothing more comes if this gives True.
    says: how many bytes it says that each record has.
    """

    def __init__(
        self,
        keys: Path,
        halt: Callable[[int], bool],
        *,
        trust_network: bool = True,
        says: int = RECORD_BYTES,
    ) -> None:
        self._listening = socket.create_server(
            ("127.0.0.2", 0)
        )  # not the address of the reader, so a line lies between
        self._halt, self._says = halt, says
        host, port = self._listening.getsockname()
        self.address = find_address(f"tcp://{host}:{port}", keys, trust_network=trust_network)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            admission = accept_stream(connection, authenticator_for(self.address, serves=True))
            while True:
                try:
                    next(admission)
                except StopIteration as end:
                    self._threads.append(threading.Thread(target=self._answer, args=(end.value[0],)))
                    self._threads[-1].start()
                    break

    def _answer(self, connection: socket.socket) -> None:
        incoming = bytearray()
        with connection, suppress(ConnectionError):  # what it has sent may be left unread
            while more := connection.recv(1 << 16):
                incoming += more
                while (request := take_request(incoming)) is not None:
                    entries = [(record, self._says) for record, *_ in request.parts]
                    answer = pack_answer(DATA, IDENTITY, entries) + bytes(RECORD_BYTES * len(entries))
                    connection.sendall(answer[: len(answer) // 2])
                    if self._halt(len(entries)):
                        connection.recv(1)  # until the reader gives it up
                        return
                    connection.sendall(answer[len(answer) // 2 :])

    def close(self) -> None:
        """End it; whoever is connected has to be gone."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_connection_file(tmp_path / "keys", generate_keys("", certificates=True))
    return tmp_path / "keys"


def test_a_server_lost_in_the_midst_of_a_record_leaves_the_window_free(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_reader, "_FIRST_PAUSE_S", 0.0)
    halts = iter([True, False])
    with (
        closing(HaltingServer(keys, lambda _: next(halts))) as server,
        closing(DataReader(server.address, 0.05, FixedWindow(RECORD_BYTES))) as reader,
    ):
        wanted = [str(server.address)], [WantedRecord(0, RECORD_BYTES)]
        assert reader.read(IDENTITY, *wanted) == [None]
        reader._silence_s = PATIENCE_S
        assert reader.read(IDENTITY, *wanted) == [bytes(RECORD_BYTES)]


@pytest.mark.parametrize("copy", [True, False])
def test_a_record_that_no_memory_holds_is_left(keys: Path, copy: bool) -> None:
    with (
        closing(HaltingServer(keys, lambda _: True, says=MAX_RECORD_BYTES)) as server,
        closing(DataReader(server.address, PATIENCE_S)) as reader,
    ):
        place = str(server.address)
        assert reader.read(IDENTITY, [place], [WantedRecord(0)], copy=copy) == [None]
        assert place in reader._failed


@pytest.mark.parametrize("trust_network", [True, False])
def test_a_server_is_silent_from_its_last_byte_on(keys: Path, trust_network: bool) -> None:
    """However long an answer takes to come: else one of a slow line would be left at its end."""
    halted = list[float]()

    def halt(records: int) -> bool:
        halted.append(time.monotonic())
        return False

    with (
        closing(HaltingServer(keys, halt, trust_network=trust_network)) as server,
        closing(DataReader(server.address, PATIENCE_S, FixedWindow(RECORD_BYTES))) as reader,
    ):
        owner = str(server.address)
        assert reader.read(IDENTITY, [owner], [WantedRecord(0, RECORD_BYTES)]) == [bytes(RECORD_BYTES)]
        assert reader._connections[owner].received_at > halted[0]
