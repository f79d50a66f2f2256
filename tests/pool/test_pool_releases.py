"""Servers and clients of the pool of different releases: each error names the release that is needed."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow._version import __version__
from torch_dpflow.errors import PeerLostError, UsageError
from torch_dpflow.pool import PooledArray, open_array
from torch_dpflow.pool.transport.address import socket_path
from torch_dpflow.pool.transport.control_connection import Channel, PoolConnection


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A message that only another release has."""


UNKNOWN: Any = Unknown()


def test_a_request_of_another_release_is_refused(tmp_path: Path) -> None:
    with (
        inner_server(tmp_path / "p", 1 << 20),
        closing(PoolConnection(tmp_path / "p")) as connection,
        pytest.raises(UsageError, match=f"clients need this server's release, {__version__}"),
    ):
        connection.request(UNKNOWN)


def test_an_answer_of_another_release_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir(mode=0o700)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(socket_path(tmp_path / "p"))
        listener.listen()
        with closing(PoolConnection(tmp_path / "p")) as connection:
            accepted, _ = listener.accept()
            with closing(accepted):
                Channel(accepted).send(UNKNOWN)
                with pytest.raises(PeerLostError, match=f"use one release, and this side has {__version__}"):
                    connection.servers()


def test_a_reader_warns_once_that_its_server_has_another_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "rows.npy", np.arange(8))
    (tmp_path / "p").mkdir(mode=0o700)
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
        listener.bind(socket_path(tmp_path / "p"))
        listener.listen()

        def answer() -> None:
            with suppress(OSError):  # it is shut down
                while True:
                    accepted = stack.enter_context(closing(listener.accept()[0]))
                    Channel(accepted).send(UNKNOWN)

        thread = threading.Thread(target=answer)
        thread.start()
        with closing(PooledArray(open_array(tmp_path / "rows.npy"), tmp_path / "p", silence_s=PATIENCE_S)) as array:
            assert [array.read_batch([row]).tolist() for row in range(3)] == [[0], [1], [2]]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "is read from storage for now: " in record.message
    assert f"use one release, and this side has {__version__}" in record.message
