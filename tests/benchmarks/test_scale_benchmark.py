"""The benchmark of scale runs what it says, and reports what its tables show."""

from __future__ import annotations

import argparse
import math
import os
import time

import pytest

from benchmarks import scale, scale_samples
from benchmarks.cluster import cpu_s
from benchmarks.scale_job import SleepingRows

COSTS = {metric.name for metric in scale.COSTS}


def test_rows_are_of_1_kb() -> None:
    rows = SleepingRows(10, 0.0)
    assert (len(rows), rows[7].nbytes, int(rows[7][0])) == (10, 1024, 7)


def test_processor_time_of_another_process_is_what_it_says_itself() -> None:
    before = time.process_time()
    assert before <= cpu_s(os.getpid()) <= time.process_time()


@pytest.mark.slow
def test_throughput_reports_what_every_role_costs() -> None:
    figures = scale.throughput(2, seconds=0.5)
    assert figures.keys() == {metric.name for metric in scale.THROUGHPUT}
    assert figures["of_linear"] == figures["samples_per_s"] / (2 / 0.05) > 0
    assert all(figures[name] >= 0 for name in COSTS)
    assert figures["shard_us"] > 0
    assert figures["service_and_client_us"] >= figures["shard_us"] + figures["client_us"]


@pytest.mark.slow
def test_memory_is_compared_between_few_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "MANY", 4)
    monkeypatch.setattr(scale, "JOBS", 2)
    figures = scale.memory(1_000, rows=64)
    assert figures.keys() == {metric.name for metric in scale.MEMORY}
    for name in ("job_mib", "worker_own_mib", "worker_start_ms", "shard_mib", "router_mib"):
        assert figures[name] > 0


def test_a_row_that_fails_says_so_and_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("a job has ended")

    figures = scale_samples._row(fail)
    assert figures.keys() == {metric.name for metric in scale_samples.METRICS}
    assert all(map(math.isnan, figures.values()))
    assert capsys.readouterr().err == "no figures: RuntimeError: a job has ended\n"
    assert scale_samples.drawn(100)["first_s"] > 0


def test_parts_are_chosen_by_name() -> None:
    assert scale.parts("memory,throughput") == ["memory", "throughput"]
    with pytest.raises(argparse.ArgumentTypeError, match="'speed' is none of throughput, memory"):
        scale.parts("speed")
