"""Checks of arguments and of nested values. Errors name the argument, its value and what is allowed.

Values from peers and files may be nested up to `MAX_DEPTH` levels. Decoders themselves allow 1,000 to 10,000 levels,
which can be too deep for code that uses the decoded value.
"""

from __future__ import annotations

import ipaddress
import json
import math
import numbers
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from torch_dpflow.errors import OptionError, OptionTypeError

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
MAX_SECONDS = 1e9
_MAX_FLOAT = sys.float_info.max
#: Line breaks and other control characters.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_TCP = re.compile(r"tcp://\S*:(\*|\d{1,5})", re.ASCII)
MAX_PORT = 65535


def as_integer(value: Any) -> int:
    """Convert an integer of Python, numpy or torch to an int. Raises TypeError for a bool, and if it is no integer."""
    if type(value) is int:
        return value
    # NumPy's bool, "bool" or "bool_", is an index in NumPy before 2.3, and a tensor of a bool is one in torch.
    if type(value).__name__ in ("bool", "bool_") or str(getattr(value, "dtype", "")) == "torch.bool":
        raise TypeError(f"{value!r:.80} is a bool")
    return operator.index(value)


def check_int(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Convert `value`, an integer of Python, numpy or torch, to an int. name: the argument's name, for errors.

    Raises OptionError if it is out of range, OptionTypeError if it is a bool or not an integer.
    """
    allowed = f"an int >= {minimum}" if maximum is None else f"an int from {minimum} to {maximum}"
    try:
        number = as_integer(value)
    except TypeError:
        raise wrong_type(name, value, allowed) from None
    if number < minimum or (maximum is not None and number > maximum):
        raise OptionError(f"{name}={number} is out of range; give {allowed}")
    return number


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float = 0.0,
    maximum: float = _MAX_FLOAT,
    exclusive: bool = False,
    unit: str = "a finite number",
) -> float:
    """Convert `value`, a real number of Python or numpy, to a float. Raises the errors of `check_int`.

    exclusive: whether to refuse the minimum itself. unit: noun for the number in errors, such as "seconds".
    """
    allowed = f"{unit} {'above' if exclusive else 'from'} {minimum:g}"
    if maximum < _MAX_FLOAT:
        allowed += f"{' and up' if exclusive else ''} to {maximum:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if not minimum <= number <= maximum or (exclusive and number == minimum):
        raise OptionError(f"{name}={value!r} is out of range; give {allowed}")
    return number


def check_seconds(name: str, value: Any, *, zero: bool = False, maximum: float = MAX_SECONDS) -> float:
    """Convert a number of seconds to a float. zero: whether to allow 0. Raises the errors of `check_int`."""
    return check_number(name, value, maximum=maximum, exclusive=not zero, unit="seconds")


def check_flag(name: str, value: Any) -> bool:
    """Convert a bool, 0 or 1 to a bool. Raises OptionTypeError for all other values, text such as "False" too."""
    # The two names are numpy's.
    is_bool = isinstance(value, int) or type(value).__name__ in ("bool", "bool_")
    if not is_bool or value not in (0, 1):
        raise wrong_type(name, value, "True or False")
    return bool(value)


def check_type(name: str, value: Any, kind: Any, allowed: str) -> None:
    """Raise OptionTypeError if `value` is no instance of `kind`. allowed: text on what to give, for the error."""
    if not isinstance(value, kind):
        raise wrong_type(name, value, allowed)


def check_name(name: str, value: str) -> None:
    """Raise OptionError if `value` has a line break or another control character. name: the argument's name."""
    if CONTROL.search(value):
        raise OptionError(f"{name}={value!r} has a line break or another control character; give it another name")


def check_path(name: str, value: Any, allowed: str = "a path or URL, as text or a pathlib.Path") -> str:
    """Return a path or URL as text. Raises OptionTypeError for other types, OptionError for characters no path has."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    check_type(name, text, str, allowed)
    try:
        has_null = b"\0" in os.fsencode(text)
    except UnicodeEncodeError as error:
        raise OptionError(f"{name}={text!r}: {error}; no path has that character") from error
    if has_null:
        raise OptionError(f"{name}={text!r} has a null byte, which no path has")
    return str(text)


def is_loopback(address: str) -> bool:
    """Return whether the host of an address, `tcp://HOST:PORT` or a URL, is a loopback address or "localhost"."""
    return is_loopback_host(urlsplit(address).hostname or "")


def is_loopback_host(host: str) -> bool:
    """Return whether `host` is a loopback address, which only this machine can reach, or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_tcp_address(name: str, value: Any) -> None:
    """Raise OptionTypeError if `value` is not text, OptionError if it is not tcp://HOST:PORT; PORT may be *."""
    check_type(name, value, str, "tcp://HOST:PORT")
    # libzmq would take "tcp://127.0.0.1" for port 127 of all interfaces, and subtract 65536 from a port above that.
    found = _TCP.fullmatch(value)
    if found is None or (found[1] != "*" and int(found[1]) > MAX_PORT):
        raise OptionError(f"{name}={value!r}: must be tcp://HOST:PORT, with a port of 0 to {MAX_PORT}")


def check_fields(
    options: object, check: Callable[..., Any], *names: str, optional: bool = False, **limits: Any
) -> None:
    """Check fields of a frozen dataclass, and set each to the result of `check(name, value, **limits)`.

    names: the names of the fields.
    optional: whether None is allowed too, without a call of `check`; errors then mention None.
    limits: keyword arguments of `check`.
    """
    for name in names:
        value = getattr(options, name)
        if value is None and optional:
            continue
        try:
            object.__setattr__(options, name, check(name, value, **limits))
        except (OptionError, OptionTypeError) as error:
            raise type(error)(f"{error}{', or None' * optional}") from None


def wrong_type(name: str, value: Any, allowed: str) -> OptionTypeError:
    return OptionTypeError(f"{name}={value!r:.80} is of type {type(value).__name__}; give {allowed}")


BYTES_ALLOWED = 'give bytes as text, such as "16GiB" or "500MB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)'
_BYTE_UNITS = {"b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(name: str, text: str, allowed: str = BYTES_ALLOWED) -> int:
    """Convert a size such as "16GiB" to bytes, at least 1. Raises OptionError. allowed: end of the error's message."""
    match = _SIZE.fullmatch(text)
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise OptionError(f"{name}={text!r} is no size; {allowed}")
    size = int(Decimal(match[1]) * unit)
    if size < 1:
        raise OptionError(f"{name}={text!r} is below one byte; {allowed}")
    return size


DURATION_ALLOWED = 'give a time as text, such as "14m" or "1h" (s, m, h, d), or a number of seconds'
_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\s*", re.ASCII)


def parse_duration(name: str, value: float | str, *, maximum: float | None = None) -> float:
    """Convert a time such as "14m" or 840 to seconds, above 0 and up to `maximum`. Raises the errors of `check_int`."""
    check_type(name, value, (str, float, int), DURATION_ALLOWED.removeprefix("give "))
    given = repr(value)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise OptionError(f"{name}={given} is no time; {DURATION_ALLOWED}")
        value = float(match[1]) * _TIME_UNITS[match[2]]
    seconds = check_seconds(name, value)
    if maximum is not None and seconds > maximum:
        raise OptionError(f"{name}={given} is too long; give at most {format_duration(maximum)}")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a text for a number of seconds, in the largest unit that gives a whole number: "14 m" for 840."""
    unit = next((unit for unit in "dhm" if seconds >= _TIME_UNITS[unit] and seconds % _TIME_UNITS[unit] == 0), "s")
    return f"{seconds / _TIME_UNITS[unit]:g} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural, such as "1 worker" or "2 workers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def working(part: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a user's object, or `default` if the object lacks it or reading it raises an error."""
    try:
        return getattr(part, name, default)
    except Exception:
        return default


def length_or_none(sized: Any) -> int | None:
    """Return the length of an object; None if `len` raises any error."""
    try:
        return len(sized)
    except Exception:
        return None


#: Maximum levels of nested lists and dicts. Annotations of samples, and messages, have fewer than ten.
MAX_DEPTH = 100
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_CONTAINERS = frozenset((dict, list))
#: Bytes with which no list or mapping that has elements begins, in msgpack.
_NO_CONTAINERS = bytes({*range(256)} - {*range(0x81, 0x90), *range(0x91, 0xA0), *range(0xDC, 0xE0)})


def is_too_deep(value: Any) -> bool:
    """Return whether lists and dicts are nested deeper than `MAX_DEPTH`. Other containers are not searched."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            parts: Iterable[Any] = one.values() if type(one) is dict else one
            if not _CONTAINERS.isdisjoint(map(type, parts)):
                inner += (part for part in parts if type(part) in _CONTAINERS)
        if not inner:
            return False
        level = inner
    return True


def check_json(data: bytes | bytearray | memoryview) -> None:
    """Raise RecursionError if JSON is nested deeper than `MAX_DEPTH`. Other faults of the JSON raise nothing here."""
    if may_be_too_deep(data):
        _check(partial(msgspec.json.decode, data))


def may_be_too_deep(data: bytes | bytearray | memoryview | str) -> bool:
    """Return whether JSON has more than `MAX_DEPTH` opening brackets, so that it may be nested too deep."""
    if len(data) <= MAX_DEPTH:
        return False
    if isinstance(data, str):
        return data.count("[") + data.count("{") > MAX_DEPTH
    text = bytes(data)
    return text.count(b"[") + text.count(b"{") > MAX_DEPTH


def check_msgpack(data: bytes | bytearray | memoryview) -> None:
    """Raise RecursionError if msgpack is nested deeper than `MAX_DEPTH`. Other faults of it raise nothing here."""
    # The deepest container may have no elements.
    if len(data) > MAX_DEPTH and len(bytes(data).translate(None, _NO_CONTAINERS)) >= MAX_DEPTH:
        _check(partial(msgspec.msgpack.decode, data, ext_hook=lambda code, data: None))


def load_json(data: bytes | str) -> Any:
    """Decode JSON like `json.loads`. Raises ValueError also for JSON that is nested deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def _check(decode: Callable[[], Any]) -> None:
    try:
        value = decode()
    except RecursionError:
        raise RecursionError(TOO_DEEP) from None
    except Exception:
        return
    if is_too_deep(value):
        raise RecursionError(TOO_DEEP)
