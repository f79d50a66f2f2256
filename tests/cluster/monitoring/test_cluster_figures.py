"""Figures of flows, shards and jobs, from what processes say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from torch_dpflow.cluster.messages.coordinator import FlowSpec, FlowView, LifeStep, Part
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.monitoring.cluster_figures import JobRow, figures_of

FLOW = FlowView(
    FlowSpec(name="f", version=1, size=100, content="0" * 64, fingerprint={}),
    "accessed",
    1,
    False,
    [LifeStep("created", 5.0)],
    Part(2, 2, 1 << 20),
)
#: As `StageTimes` is on the wire.
FIRST, SECOND = [0.5, 0.0, 1.0, 0.0, 0.0, {40: 6}], [0.25, 0.0, 1.0, 0.0, 0.0, {40: 1, 80: 3}]
READING = {"stall_s": 1.0, "reading_s": 4.0, "batches": 3, "samples": 30, "bytes": 900}


def view(part: str, role: str, restarts: int = 0, **status: Any) -> ProcessView:
    return ProcessView(f"f:v1/{part}", role, 7, 99, "", status, restarts)


def shard(number: int, **status: Any) -> ProcessView:
    return view(f"shard-{number:03}", "shard", number, **status)


def test_a_flow_is_the_sum_of_its_shards() -> None:
    figures = figures_of(
        [FLOW],
        [
            view("router", "router", 2, generation=5, readings={"job": READING}),
            shard(
                0,
                keys=50,
                wants=10,
                shared=4,
                decodes=6,
                served=8,
                times=FIRST,
                queued=1,
                held_bytes=100,
                workers=1,
            ),
            shard(
                1,
                keys=50,
                wants=30,
                shared=26,
                decodes=4,
                served=32,
                times=SECOND,
                queued=2,
                held_bytes=50,
                workers=1,
            ),
            view("shard-001/worker-0", "worker", 3),
            ProcessView("f:v10/shard-000", "shard", 1, 1, "", {"keys": 9, "served": 1000}),
        ],
    )
    (flow,) = figures.flows
    assert (flow.generation, flow.shards, flow.restarts) == (5, 2, 2 + 1 + 3)
    assert (flow.figures.hit_rate, flow.figures.decodes_per_sample) == (0.75, 0.25)
    assert (flow.figures.queued, flow.figures.held_bytes, flow.figures.workers) == (3, 150, 2)
    assert (flow.figures.times.read_s, flow.figures.times.counts) == (0.75, {40: 7, 80: 3})
    assert [(row.shard, row.restarts, row.worker_restarts) for row in figures.shards] == [
        ("shard-000", 0, 0),
        ("shard-001", 1, 3),
    ]
    assert figures.jobs == [JobRow(flow="f:v1", job="job", **READING)]  # type: ignore[arg-type]
    assert figures.jobs[0].stall_share == 0.25


@pytest.mark.parametrize("status", [{}, {"keys": "many", "wants": None, "readings": 3, "times": {}}])
def test_processes_that_have_not_said_anything_yet_count_nothing(status: dict[str, Any]) -> None:
    figures = figures_of([FLOW], [view("router", "router", **status), shard(0, **status)])
    assert figures.flows[0].figures.hit_rate == figures.flows[0].figures.decodes_per_sample == 0.0
    assert figures.flows[0].figures.times.samples == 0
    assert figures.jobs == []
