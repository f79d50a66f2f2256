"""Servers and clients of the pool of different releases: each error names the release that is needed."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pool.pool_servers import inner_server
from torch_dpflow._version import __version__
from torch_dpflow.errors import PeerLostError, UsageError
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
