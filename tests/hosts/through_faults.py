"""Epochs that are read while a thread disturbs the workers, and how long batches were missed."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.loader_cases import assert_same

#: For how long after a kill a stall counts as its own, and what it may last, seconds.
STALL_S = 5.0
#: When one batch came and when the next did, seconds.
Gaps = list[tuple[float, float]]


def read_through(remote: Any, local: Any, faults: threading.Thread) -> tuple[int, Gaps]:
    """Compare epochs of both loaders until the faults are over, at least three; how many there were, and the gaps."""
    assert_same(list(remote), list(local))
    faults.start()
    gaps: Gaps = []
    epochs = 0
    while epochs < 3 or faults.is_alive():
        batches: list[Any] = []
        last = time.monotonic()
        for batch in remote:
            gaps.append((last, last := time.monotonic()))
            batches.append(batch)
        assert_same(batches, list(local))
        epochs += 1
    return epochs, gaps


def longest(gaps: Gaps, begin: float, end: float) -> float:
    """The longest gap of those that reach into this time."""
    return max((later - sooner for sooner, later in gaps if later >= begin and sooner <= end), default=0.0)


def report_kills(gaps: Gaps, kills: Sequence[float]) -> None:
    """Print the stalls after kills, and check them."""
    stalls = [longest(gaps, at, at + STALL_S) for at in kills]
    p95 = statistics.quantiles(stalls, n=20, method="inclusive")[-1]
    print(
        f"  after {len(stalls)} kills: median {statistics.median(stalls):.2f}, p95 {p95:.2f}, most {max(stalls):.2f} s"
    )
    assert p95 <= STALL_S
