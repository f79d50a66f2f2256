"""The benchmark that counts what is lost and repeated: it counts right, and finds nothing in ours."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks import exactly_once
from benchmarks.exactly_once import Visits, count, epoch_with_a_kill, row
from benchmarks.exactly_once_sides import BATCH


def test_what_is_lost_and_what_comes_again_is_counted() -> None:
    assert count([2, 0, 1, 3], 4) == Visits(lost=0, repeated=0)
    assert count([1, 1, 1, 3], 4) == Visits(lost=2, repeated=2)
    assert count([], 4) == Visits(lost=4, repeated=0)
    with pytest.raises(ValueError, match=r"samples \[4\] came, and there are 4"):
        count([4], 4)


class Recorded:
    """A side that tells what was done with it, and in what order."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.events: list[str] = []

    def read(self) -> Iterator[list[int]]:
        for first in range(0, self.samples, BATCH):
            self.events.append("batch")
            yield [*range(first, first + BATCH)]

    def kill(self) -> None:
        self.events.append("kill")

    def settle(self) -> None:
        self.events.append("settle")


def test_a_worker_is_killed_in_the_middle() -> None:
    side = Recorded(4 * BATCH)
    assert epoch_with_a_kill(side, side.samples) == Visits(lost=0, repeated=0)
    assert side.events == ["batch", "batch", "kill", "batch", "batch", "settle"]


def test_a_row_has_sums_medians_and_ranges() -> None:
    visits = [Visits(lost=lost, repeated=2 * lost) for lost in (0, 3, 1)]
    assert row("x", visits) == ["x", "4", "8", "1 of 3", "1 (0-3)", "2 (0-6)"]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["dpflow, shared flow", "dpflow, private, remote workers"])
def test_ours_loses_and_repeats_nothing(side: str, capsys: pytest.CaptureFixture[str]) -> None:
    exactly_once.main(["--quick", "--json", f"--side={side}"])
    told = json.loads(capsys.readouterr().out)
    assert told["epochs"] == [{"lost": 0, "repeated": 0}] * 2
