"""What the patent's way comes to in simulated time, as derived, and ours beside it in the same room."""

from __future__ import annotations

import pytest

from tests.later import Later

prefetch = Later("benchmarks.prefetch")

SAMPLES = 4_000


def test_the_patents_way_comes_to_what_is_derived_and_ours_hits_in_its_room() -> None:
    nodes = k = 8
    sides = prefetch.sides(SAMPLES, nodes, k)
    for times in (2, 4):
        figures = prefetch.Epoch(sides[f"patent, T = {times}L"], seed=1).run()
        derived = prefetch.derived(nodes, k, times)
        assert figures["hit_rate"] == pytest.approx(derived["hit_rate"], abs=0.005)
        assert figures["requests"] == pytest.approx(derived["requests"], rel=0.04)
        assert figures["mean_held"] == pytest.approx(derived["mean_held"], rel=0.05)
        assert figures["moves"] == pytest.approx(derived["moves"], rel=0.1)
    ours = prefetch.Epoch(sides["ours, the same room"], seed=1).run()
    assert ours["later_hit_rate"] == 1.0
    assert ours["moves"] == 0
    assert prefetch.Epoch(sides["ours, the room and its lead"], seed=1).run()["requests"] < 1.06 / k


def test_the_figures_are_printed_beside_those_derived(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefetch.main(["--quick", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "ours, the same room" in printed
    assert "derived, T = 2L: hit_rate 0.875" in printed
    with pytest.raises(SystemExit):
        prefetch.main(["--k", "1"])
