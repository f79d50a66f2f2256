"""What a Lookahead turns down, and what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_dpflow.errors import OptionError
from torch_dpflow.lookahead import Lookahead


def test_an_order_is_certain_from_where_the_job_stands() -> None:
    order = np.array([4, 2, 0, 3])
    told = Lookahead.of_order(order, epoch=2, position=1)
    assert (told.epoch, told.length, told.position) == (2, 4, 1)
    assert told.certain.tolist() == [2, 0, 3]
    assert told.members is order
    assert told.complete


def test_of_an_unknown_order_only_the_length_is_told() -> None:
    told = Lookahead.unknown(7, epoch=0)
    assert (told.length, len(told.certain), len(told.likely), told.members) == (7, 0, 0, None)
    assert not told.complete
    assert Lookahead.unknown(0, epoch=0).complete


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": -1}, "length=-1"),
        ({"position": 5}, "position=5"),
        ({"position": -1}, "position=-1"),
        ({"certain": np.arange(4), "likely": np.array([4])}, "4 certain and 1 likely.*into the 4"),
        ({"certain": [0, 1]}, "certain: a one-dimensional integer numpy array is required, got list"),
        ({"certain": np.zeros((1, 1), dtype=np.int64)}, r"certain: .*\(1, 1\)"),
        ({"likely": np.array([0.5])}, "likely: .*float64"),
        ({"members": np.array([1, -3])}, "members: .*negative, got -3"),
        ({"following": np.array([-1])}, "following: .*negative"),
        ({"likely": np.array([1]), "weights": np.array([0.5, 0.5])}, "2 weights for 1 likely"),
        ({"likely": np.array([1]), "weights": np.array([0.0])}, "positive weight"),
        ({"likely": np.array([1]), "weights": np.array([np.nan])}, "positive weight"),
    ],
)
def test_what_does_not_fit_is_turned_down(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Lookahead(**({"epoch": 0, "length": 4} | changes))
