"""Capacities as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from torch_dpflow.caches.policy import Capacity, parse_capacity
from torch_dpflow.errors import OptionError, OptionTypeError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("500MB", 500_000_000),
        ("16GiB", 16 * 2**30),
        (" 1.5 KiB ", 1536),
        ("2kb", 2000),
        ("3TIB", 3 * 2**40),
        ("0.5 GB", 500_000_000),
    ],
)
def test_text_is_bytes(text: str, size: int) -> None:
    assert parse_capacity(text) == Capacity(bytes=size)


def test_no_number_is_too_large_to_be_read() -> None:
    assert (parse_capacity("9" * 400 + "GB").bytes or 0) > 10**400


def test_an_int_is_samples() -> None:
    assert parse_capacity(7) == Capacity(items=7)


@pytest.mark.parametrize(
    "capacity", ["12XB", "GiB", "", "12", "-1GB", "0B", "0.1B", "1e3 MB", "1 G B", "٣MB", 0, -1, True, False]
)
def test_what_is_no_capacity_is_answered_with_those_allowed(capacity: Any) -> None:
    with pytest.raises(OptionError, match=r'capacity=.*"16GiB" or "500MB".*number of samples') as caught:
        parse_capacity(capacity)
    assert repr(capacity) in str(caught.value)


@pytest.mark.parametrize("capacity", [None, 1.5, b"1GB", ["1GB"]])
def test_a_capacity_of_the_wrong_type_is_answered_with_those_allowed(capacity: Any) -> None:
    with pytest.raises(OptionTypeError, match=r'capacity=.*"16GiB"'):
        parse_capacity(capacity)
