"""The algorithms benchmark runs, and counts what it says it counts."""

import json

import pytest

from benchmarks.algorithm_timing import Jobs, access_rate, draw_rate
from benchmarks.algorithms import main


@pytest.mark.slow
def test_json_has_one_object_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--only", "minio"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["subject"] for line in lines} == {"minio"}
    assert {line["unit"] for line in lines} == {"accesses/s", "bytes/sample/job"}
    assert all(line["median"] > 0 and line["machine"]["cores"] >= 1 for line in lines)


def test_all_indices_of_an_epoch_are_drawn() -> None:
    timed = draw_rate("shared-log", Jobs.overlapping(5000), batch=100)
    assert timed.operations == 7 * 2500
    assert timed.seconds > 0


@pytest.mark.parametrize("bulk", [False, True])
def test_every_job_reads_its_epoch(bulk: bool) -> None:
    assert access_rate("alsd", 5000, 3, bulk=bulk).operations == 15_000
