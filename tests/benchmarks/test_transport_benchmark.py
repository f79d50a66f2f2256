"""The sides of the transport benchmark do the work that they are measured at."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transport_sides import BIG_BYTES, pickle_apart, unpickle

leaves = (
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from([b"", b"x" * 300, b"y" * BIG_BYTES])
)
objects = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.integers(), inner), max_leaves=9
)


@given(objects)
def test_what_is_pickled_apart_returns(obj: Any) -> None:
    assert unpickle([memoryview(frame) for frame in pickle_apart(obj)]) == obj


def test_big_bytes_objects_travel_without_a_copy_and_keep_their_place() -> None:
    big = [os.urandom(BIG_BYTES + size) for size in (0, 1, 100_000)]
    head, *frames = pickle_apart(
        {"a": big[0], "b": [big[1], "z" * BIG_BYTES, big[0]], "c": (big[2], b"small")}
    )
    assert all(frame is content for frame, content in zip(frames, (big[0], big[1], big[2])))
    assert len(frames) == 3
    assert len(head) < BIG_BYTES + 500
    assert unpickle([head, *frames])["b"] == [big[1], "z" * BIG_BYTES, big[0]]


@pytest.mark.slow
def test_every_side_returns_what_it_was_sent(tmp_path: Path) -> None:
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
