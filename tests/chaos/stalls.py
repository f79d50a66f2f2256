"""How long jobs waited for a batch, and after which fault."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.chaos_jobs import ChaosJob
from tests.chaos.faults import Fault

#: A shorter wait is none, seconds.
SHORTEST_S = 0.5
#: What is ready ahead of need lasts for about so long: a fault shows later by that much, seconds.
LEAD_S = 1.0


@dataclass(frozen=True)
class Stall:
    """A wait of one job between two batches, beyond what its step takes."""

    job: int
    began: float
    seconds: float
    #: What was done to the job itself and to the cluster, shortly before or meanwhile: what lasted longest first.
    causes: tuple[Fault, ...]


def stalls_of(jobs: Sequence[ChaosJob], faults: Sequence[Fault]) -> list[Stall]:
    """Every stall of every job, the longest first."""
    found = []
    for job in jobs:
        times = [float(line[2]) for line in job.lines()]
        for sooner, later in itertools.pairwise(times):
            seconds = later - sooner - job.given.step_s
            if seconds >= SHORTEST_S:
                causes = _causes(job.given.number, sooner, later, faults)
                found.append(Stall(job.given.number, sooner, seconds, causes))
    return sorted(found, key=lambda stall: -stall.seconds)


def _causes(job: int, sooner: float, later: float, faults: Sequence[Fault]) -> tuple[Fault, ...]:
    def share(fault: Fault) -> float:
        """Of the stall, seconds; a process that is killed is away for a second or so."""
        return min(later, max(fault.until, fault.at + LEAD_S)) - max(sooner - LEAD_S, fault.at)

    own = [fault for fault in faults if fault.role != "job" or fault.id == str(job)]
    return tuple(sorted((fault for fault in own if share(fault) > 0), key=share, reverse=True))


def table(stalls: Sequence[Stall], faults: Sequence[Fault], began: float) -> str:
    """For people: each kind of fault with the stalls that it was the first cause of, and the longest stalls."""
    after: defaultdict[str, list[float]] = defaultdict(list)
    for stall in stalls:
        after[stall.causes[0].kind if stall.causes else "none"].append(stall.seconds)
    struck = defaultdict(int, dict.fromkeys(after, 0))
    for fault in faults:
        struck[fault.kind] += 1
    rows = [f"{'fault':<20}{'struck':>8}{'stalls':>8}{'median':>9}{'longest':>9}  (stalls of 0.5 s or more)"]
    for kind in sorted(struck):
        waits = after[kind]
        median = f"{statistics.median(waits):.1f} s" if waits else "-"
        longest = f"{max(waits):.1f} s" if waits else "-"
        rows.append(f"{kind:<20}{struck[kind]:>8}{len(waits):>8}{median:>9}{longest:>9}")
    rows.append("the longest stalls:")
    for stall in stalls[:8]:
        causes = "; ".join(f"{one} at {one.at - stall.began:+.1f} s" for one in stall.causes[:6]) or "no fault"
        rows.append(f"{stall.seconds:6.1f} s, job {stall.job}, {stall.began - began:.0f} s in: {causes}")
    return "\n".join(rows)
