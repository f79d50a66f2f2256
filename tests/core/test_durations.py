"""Times as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from torch_dpflow._core.checks import format_duration, parse_duration
from torch_dpflow.errors import OptionError, OptionTypeError


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("14m", 840.0), ("1.5 h", 5400.0), ("90s", 90.0), ("1d", 86400.0), (30, 30.0), (0.5, 0.5)],
)
def test_a_time_is_read(given: Any, seconds: float) -> None:
    assert parse_duration("lifetime", given) == seconds


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ("14", OptionError, "lifetime='14' is no time; give a time as text, such as \"14m\""),
        ("1h30m", OptionError, "is no time"),
        ("", OptionError, "is no time"),
        ("0s", OptionError, "out of range"),
        (-1, OptionError, "out of range"),
        ("15m", OptionError, "lifetime='15m' is too long; give at most 14 m"),
        (None, OptionTypeError, "of type NoneType; give a time as text"),
        (True, OptionTypeError, "of type bool"),
    ],
)
def test_what_is_no_time_is_told_with_what_to_give(given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        parse_duration("lifetime", given, maximum=840)


@pytest.mark.parametrize(
    ("seconds", "text"), [(840, "14 m"), (3600, "1 h"), (86400, "1 d"), (61, "61 s"), (0.5, "0.5 s")]
)
def test_a_time_is_shown(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
