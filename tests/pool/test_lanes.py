"""Lanes of every kind, by their contract."""

from __future__ import annotations

from pathlib import Path

from tests.support.lanes import LaneContract
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.pool.transport.address import PoolAddress, find_address

_KEYS = generate_keys("", certificates=True)


def _door(folder: Path, *, trust_network: bool) -> PoolAddress:
    write_connection_file(folder / "keys", _KEYS)
    return find_address("tcp://127.0.0.1:0", folder / "keys", trust_network=trust_network)


class TestMappedLane(LaneContract):
    def door(self, tmp_path: Path) -> PoolAddress | None:
        return None


class TestPlainLane(LaneContract):
    def door(self, tmp_path: Path) -> PoolAddress | None:
        return _door(tmp_path, trust_network=True)


class TestTLSLane(LaneContract):
    def door(self, tmp_path: Path) -> PoolAddress | None:
        return _door(tmp_path, trust_network=False)
