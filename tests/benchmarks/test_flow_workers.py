"""`benchmarks.flow_workers`: what a flow would need, for a user's numbers."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from benchmarks.flow_workers import main

NUMBERS = ["--samples-per-second", "100", "--sample-seconds", "0.05", "--duration", "5m"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_it_says_how_many_workers_and_for_how_long() -> None:
    arguments = [*NUMBERS, "--jobs", "2", "--price", "3.6"]
    facts = json.loads(run(*arguments, "--json").output)
    assert facts["workers_needed"] == 10
    assert 10 <= facts["max_workers"] <= 20
    assert facts["min_worker_seconds"] <= facts["worker_seconds"] <= 1.5 * facts["min_worker_seconds"]
    assert facts["cost"] == facts["worker_seconds"] / 1000
    told = run(*arguments).output
    assert "workers: at most 10 are busy" in told
    assert f"cost: {facts['cost']:.2f}" in told


def test_what_cannot_be_simulated_is_refused() -> None:
    for arguments, message in (
        ([*NUMBERS, "--jobs", "9", "--apart", "1m"], "the last would start after --duration"),
        ([*NUMBERS, "--sample-seconds", "3600"], "workers busy; a cluster has 4096 at most"),
        ([*NUMBERS, "--cold-start", "soon"], "'soon' is no time"),
        ([*NUMBERS, "--sample-seconds", "0"], "is not in the range"),
    ):
        result = run(*arguments)
        assert result.exit_code != 0
        assert message in result.output
