"""The benchmark of CURVE measures what its sides do."""

from __future__ import annotations

import pytest

from benchmarks.curve import SIDES, measure


@pytest.mark.parametrize("side", SIDES)
def test_a_side_is_measured(side: str) -> None:
    figures = measure(8, 2, *SIDES[side])
    assert figures["mb_s"] > 0
