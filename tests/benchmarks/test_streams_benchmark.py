"""The benchmark of streams: both sides map the same items."""

from __future__ import annotations

import json

import pytest

from tests.later import Later

pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")
streams = Later("benchmarks.streams")


def test_both_sides_of_each_workload_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    streams.main(["--quick", "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["workload"] for record in records] == list(streams.WORKLOADS)
    for record in records:
        assert set(record["rounds"]) == {"ParallelMapper", "Mapper"}
        assert all(one["items_per_s"] > 0 for runs in record["rounds"].values() for one in runs)


def test_a_side_that_loses_items_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams.SIDES, "Mapper", lambda items, fn: streams.ours(items - 1, fn))
    with pytest.raises(RuntimeError, match="9 results of 10 items"):
        streams.measure("Mapper", 10, streams.array)
