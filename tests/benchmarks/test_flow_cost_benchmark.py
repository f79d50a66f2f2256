"""The benchmark of a flow's cost divides processor time by the samples that jobs received and workers loaded."""

from __future__ import annotations

import pytest

from benchmarks import flow_cost
from benchmarks.cluster import RoleUse
from benchmarks.scale_job import ReadyRows


def test_rows_are_of_the_size_that_was_given() -> None:
    rows = ReadyRows(10, 512)
    assert (len(rows), rows[3].nbytes) == (10, 512)
    assert rows[3] is rows[4]


def test_processor_time_is_counted_from_the_first_look_to_the_second() -> None:
    before = {role: RoleUse(cpu_s=1.0) for role in ("shard", "router", "node", "coordinator")}
    after = {role: RoleUse(cpu_s=1.5) for role in (*before, "worker")}
    found = flow_cost.costs(before, after, job_s=0.25, received=1000, loaded=500)
    assert found["shard_us"] == found["router_us"] == pytest.approx(500.0)
    assert found["node_us"] == pytest.approx(1000.0)
    assert found["worker_us"] == pytest.approx(1500.0)
    assert found["worker_loaded_us"] == pytest.approx(3000.0)
    assert found["job_us"] == pytest.approx(250.0)
    assert found["total_us"] == pytest.approx(500.0 * 4 + 1500.0 + 250.0)


@pytest.mark.slow
def test_jobs_that_read_together_share_their_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_cost, "STATUS_AGE_S", 1.5)
    figures = flow_cost.measure(2, samples=512, nbytes=512, batch_size=32, shards=2, workers=2)
    assert figures.keys() == {metric.name for metric in flow_cost.METRICS}
    assert all(value > 0 for value in figures.values())
