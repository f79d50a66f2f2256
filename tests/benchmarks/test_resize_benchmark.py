"""The benchmark of resized epochs: it counts what comes, and finds nothing in ours."""

from __future__ import annotations

from typing import Any

from benchmarks.exactly_once import Visits
from benchmarks.resize import SAMPLES, measure, read_epoch, row


def repeating(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
    """A side that begins anew, and one of whose ranks refuses the third size."""
    if states == [1, 1]:
        raise ValueError("no state of two ranks")
    return iter([[rank]] * 3), lambda: len(states or []) + 1


def test_ours_reads_each_sample_once() -> None:
    visits, refused = measure("dpflow, DistributedSampler", [(3, 8, 4), (2, 150, 100)])
    assert (visits, refused) == (Visits(lost=0, repeated=0), "")


def test_what_each_rank_reads_is_gathered_until_a_state_is_refused() -> None:
    seen, refused = read_epoch(repeating, [(2, 1, 2), (1, 1, 1)])
    assert (sorted(seen), refused) == ([0, 0, 1, 1], "ValueError: no state of two ranks")
    assert row("one", Visits(lost=SAMPLES - 2, repeated=2), refused) == (
        "| one | 2,398 | 2 | ValueError: no state of two ranks |"
    )
