"""Thread-safe building of msgspec's decoders: one at a time.

msgspec (0.22) describes a struct at its first use, and other threads see the description before it is complete. If two
threads use a struct for the first time at once, the process ends by SIGSEGV. So only this module calls
`msgspec.convert`, makes decoders of types, or decodes with `type=`.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_building = threading.RLock()


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder of JSON to the type `kind`; any thread can use it."""
    return _built(msgspec.json.Decoder, kind)  # type: ignore[no-any-return]


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of MessagePack to the type `kind`; any thread can use it."""
    return _built(msgspec.msgpack.Decoder, kind)  # type: ignore[no-any-return]


def converted(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """Convert plain values to the type `kind` like `msgspec.convert`. Raises msgspec.ValidationError."""
    with _building:
        return msgspec.convert(value, kind, strict=strict)


@functools.lru_cache(maxsize=1024)
def _built(format: Any, kind: Any) -> Any:
    with _building:
        return format(kind)


def _after_fork_in_child() -> None:
    global _building
    _building = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
