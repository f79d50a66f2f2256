"""The benchmark of a search: what it says of a link that is full, and how it tells that."""

from __future__ import annotations

from benchmarks.report import Comparison
from benchmarks.search import LOCAL, REMOTE, TRIALS, Search, limits_of
from benchmarks.sharing import Scenario


def search(side: str) -> Search:
    return Search(side=side, scenario=Scenario(jobs=TRIALS), samples=128, epochs=1, cache=0.0, link_bits=8e6)


def test_what_limited_the_trials_is_told_of_each_side() -> None:
    runs = {side: search(side) for side in (LOCAL, REMOTE)}
    runs[LOCAL]._note([{"limited_by": ""}, {"limited_by": ""}])
    runs[REMOTE]._note([{"limited_by": "network"}, {"limited_by": "workers"}])
    limits = {side: run.limits for side, run in runs.items()}
    comparison = Comparison(benchmark="search", workload="", rounds={}, parameters={"limited_by": limits})
    assert limits_of(comparison).endswith(f"{LOCAL}: - 2; {REMOTE}: network 1, workers 1")


def test_sides_have_the_workers_that_their_names_say() -> None:
    runs = [search(side) for side in (LOCAL, REMOTE)]
    assert [(run.kind, run.workers) for run in runs] == [("private", 2), ("dpflow", 8)]
