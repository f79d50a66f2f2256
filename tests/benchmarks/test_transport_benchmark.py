"""The sides of the transport benchmark do the work that they are measured at."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run

import pytest

from benchmarks.transport import CONTESTANTS, contestant


@pytest.mark.slow
def test_our_side_gets_back_what_it_sends(tmp_path: Path) -> None:
    """It compares before it counts, as every side does."""
    side, keeps = CONTESTANTS["dpflow"]
    with contestant(side, keeps, "ipc", str(tmp_path / "s")) as work:
        for kind in ("bytes", "arrays", "ping"):
            assert all(value > 0 for value in work(kind, 2).values())


@pytest.mark.slow
def test_every_side_is_measured_at_every_workload() -> None:
    command = [sys.executable, "-m", "benchmarks.transport", "--quick", "--json", "--rounds", "1"]
    done = run(command, capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["workload"] for record in records] == [
        "5 x 500 kB bytes, tcp",
        "5 x 500 kB arrays, tcp",
        "50 B, tcp",
        "5 x 500 kB bytes, ipc",
        "5 x 500 kB arrays, ipc",
        "50 B, ipc",
    ]
    for record in records:
        assert set(record["median"]) == {"grpc", "grpc, memory kept", "raw socket, memory kept", "dpflow"}
