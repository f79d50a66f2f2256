"""Checks of what callers give: what they take, what they refuse, and what they say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torch_dpflow._core.checks import check_fields, check_flag, check_int, check_number, check_seconds
from torch_dpflow.errors import OptionError, OptionTypeError


@pytest.mark.parametrize("given", [3, np.int32(3), np.uint64(3), torch.tensor(3)])
def test_whole_numbers_of_any_maker_become_ints(given: Any) -> None:
    assert type(check_int("n", given, minimum=0, maximum=3)) is int


@pytest.mark.parametrize("given", [True, np.True_, torch.tensor(True), 3.0, "3", None, np.float64(3)])
def test_what_is_no_whole_number_is_refused(given: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"^n=.* is of type \w+; give an int from 0 to 3$"):
        check_int("n", given, minimum=0, maximum=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: check_int("n", 0, minimum=1), "n=0 is out of range; give an int >= 1"),
        (lambda: check_int("n", 4, minimum=1, maximum=3), "n=4 is out of range; give an int from 1 to 3"),
        (
            lambda: check_number("x", 1.5, maximum=1),
            "x=1.5 is out of range; give a finite number from 0 to 1",
        ),
        (lambda: check_number("x", float("inf")), "x=inf is out of range; give a finite number from 0"),
        (lambda: check_number("x", 10**400), "is out of range; give a finite number from 0"),
        (lambda: check_number("x", float("nan"), minimum=-1), "x=nan is out of range"),
        (lambda: check_number("x", 0, exclusive=True), "x=0 is out of range; give a finite number above 0"),
        (
            lambda: check_seconds("s", 2e9),
            r"s=2000000000.0 is out of range; give seconds above 0 and up to 1e\+09",
        ),
        (lambda: check_seconds("s", -1, zero=True), "s=-1 is out of range; give seconds from 0 to"),
    ],
)
def test_what_is_out_of_range_is_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        given()


@pytest.mark.parametrize("given", ["no", "True", 2, None, 0.0, []])
def test_what_is_no_flag_is_refused(given: Any) -> None:
    with pytest.raises(OptionTypeError, match="; give True or False"):
        check_flag("flag", given)


def test_numbers_and_flags_of_numpy_become_pythons() -> None:
    assert type(check_number("x", np.float32(0.5))) is float
    assert check_flag("flag", np.False_) is False
    assert check_flag("flag", 1) is True


def test_fields_of_a_frozen_dataclass_become_what_was_checked() -> None:
    @dataclass(frozen=True)
    class Options:
        least: Any
        most: Any = None

        def __post_init__(self) -> None:
            check_fields(self, check_int, "least", minimum=1)
            check_fields(self, check_int, "most", minimum=1, optional=True)

    assert type(Options(np.int64(4)).least) is int
    assert Options(1).most is None
    with pytest.raises(OptionTypeError, match="least=None"):
        Options(None)
    with pytest.raises(OptionError, match="most=0"):
        Options(1, 0)
