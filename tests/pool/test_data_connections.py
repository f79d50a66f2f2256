"""Lanes of every kind, by their contract."""

from __future__ import annotations

from pathlib import Path

from tests.support.data_connections import DataConnectionContract
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.pool.transport.address import PoolAddress, find_address

_KEYS = generate_keys("", certificates=True)


def _tcp_listener(folder: Path, *, trust_network: bool) -> PoolAddress:
    write_connection_file(folder / "keys", _KEYS)
    return find_address("tcp://127.0.0.1:0", folder / "keys", trust_network=trust_network)


class TestMappedLane(DataConnectionContract):
    def listen(self, tmp_path: Path) -> PoolAddress | None:
        return None


class TestPlainLane(DataConnectionContract):
    def listen(self, tmp_path: Path) -> PoolAddress | None:
        return _tcp_listener(tmp_path, trust_network=True)


class TestTLSLane(DataConnectionContract):
    def listen(self, tmp_path: Path) -> PoolAddress | None:
        return _tcp_listener(tmp_path, trust_network=False)
