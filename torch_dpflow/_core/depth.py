"""Limit of the nesting of values from peers and files, the same with every Python.

The decoders' own limit is the interpreter's recursion limit: about 1,000 levels in Python 3.11, 10,000 in 3.13, and
fewer the deeper the caller is. So a value that the decoder accepts may be nested too deeply for later code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

#: Levels of lists and mappings. Annotations and messages have fewer than ten.
MAX_DEPTH = 100
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_CONTAINERS = frozenset((dict, list))
#: Bytes with which no list or mapping that has elements begins, in msgpack.
_NO_CONTAINERS = bytes({*range(256)} - {*range(0x81, 0x90), *range(0x91, 0xA0), *range(0xDC, 0xE0)})


def is_too_deep(value: Any) -> bool:
    """Return whether lists and dicts are nested deeper than `MAX_DEPTH`. Values of other types are not inspected."""
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
    """Raise RecursionError if this JSON is nested too deep. Invalid JSON is left to its decoder."""
    if may_be_too_deep(data):
        _check(partial(msgspec.json.decode, data))


def may_be_too_deep(data: bytes | bytearray | memoryview | str) -> bool:
    """Return whether this JSON has enough brackets to be too deep. Fast."""
    if len(data) <= MAX_DEPTH:
        return False
    if isinstance(data, str):
        return data.count("[") + data.count("{") > MAX_DEPTH
    text = bytes(data)
    return text.count(b"[") + text.count(b"{") > MAX_DEPTH


def check_msgpack(data: bytes | bytearray | memoryview) -> None:
    """Raise RecursionError if this msgpack is nested too deep. Invalid msgpack is left to its decoder."""
    if len(data) > MAX_DEPTH and len(bytes(data).translate(None, _NO_CONTAINERS)) > MAX_DEPTH:
        _check(partial(msgspec.msgpack.decode, data, ext_hook=_no_value))


def load_json(data: bytes | str) -> Any:
    """Decode as `json.loads`. Raises ValueError also if it is nested too deep."""
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


def _no_value(code: int, data: memoryview) -> None:
    return None
