"""What tests of every platform's launcher share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.shared_cluster import PATIENCE_S


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where workers call."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server
