"""Encoding of samples' annotations as JSON. Values of numpy and torch are converted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from torch_dpflow._core.checks import TOO_DEEP, check_json
from torch_dpflow.errors import SourceError

_NANOSECONDS = 10**9
_MINUTE = timedelta(minutes=1)
_BYTES = (bytes, bytearray, memoryview)
#: Values that `_wrong_values` looks at, or that JSON holds as text.
_KEPT = (*_BYTES, Decimal, datetime, date, time, timedelta, UUID)


def encode_annotations(meta: Mapping[str, Any], name: str) -> msgspec.Raw:
    """Encode annotations as a JSON object; `name` names the sample in errors.

    Times become ISO 8601 text, exact to the nanosecond. Decimals become text, enumerations their values. Dataclasses
    and elements of structured arrays become objects.

    Raises:
        SourceError: the annotations are not a mapping, or nested too deeply; a mapping has several keys with the same
            text; JSON cannot hold a value, such as NaN, NaT, bytes, or a time whose offset from UTC has seconds.
    """
    try:
        encoded = _ENCODER.encode(meta)
        check_json(encoded)
        # NaN and infinity are encoded as null, bytes as base64, equal keys twice: then both differ. So do tuples.
        wrong = None if _is_equal(_DECODER.decode(encoded), meta) else next(_wrong_values(meta), None)
    except RecursionError as error:  # they cannot be printed either
        raise SourceError(f"the annotations of {name} cannot be kept: {TOO_DEEP}") from error
    except Exception as error:  # of any kind, by tolist() of any library: a sparse tensor's raises RuntimeError
        raise SourceError(f"the annotations of {name} cannot be written as JSON: {error}: {meta!r:.500}") from error
    if not encoded.startswith(b"{"):
        raise SourceError(f"the annotations of {name} are no mapping: {meta!r:.500}")
    if wrong is not None:
        raise SourceError(f"the annotations of {name} have {wrong}: {meta!r:.500}")
    return msgspec.Raw(encoded)


def iso_duration(nanoseconds: int) -> str:
    """Return a duration as ISO 8601 text, exact to the nanosecond."""
    seconds, rest = divmod(abs(nanoseconds), _NANOSECONDS)
    return f"{'-' if nanoseconds < 0 else ''}PT{seconds}.{rest:09d}S"


def _is_equal(decoded: Any, meta: Any) -> bool:
    try:
        return bool(decoded == meta)
    except Exception:  # an array has no single truth value
        return False


def _wrong_values(meta: Any) -> Iterator[str]:
    """Yield each value that JSON cannot hold, with its field."""
    return _wrong(msgspec.to_builtins(meta, builtin_types=_KEPT, enc_hook=_plain), "")


def _wrong(value: Any, field: str) -> Iterator[str]:
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            yield f"{field}={value!r}, which JSON cannot hold; give a finite number or None, or leave it out"
    elif isinstance(value, datetime | time) and (shift := value.utcoffset()) is not None and shift % _MINUTE:
        yield (
            f"{field}={value.isoformat()}, whose offset from UTC has seconds, which JSON's times cannot hold; convert "
            "it: time.astimezone(datetime.timezone.utc)"
        )
    elif isinstance(value, _BYTES):
        yield f"{field}={bytes(value)!r:.80}, and JSON holds no bytes; give text, or numbers"
    elif isinstance(value, dict):
        if len(_DECODER.decode(_ENCODER.encode(dict.fromkeys(value)))) < len(value):
            yield f"{field or 'keys'}={value!r:.200}, with keys that are the same text in JSON"
        for key, inner in value.items():
            if not isinstance(key, str):
                yield from _wrong(key, f"the key {field}")
            yield from _wrong(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _wrong(inner, f"{field}[{position}]")


def _plain(value: Any) -> Any:
    """Convert a value that the encoder does not support. The result's elements may need this function again."""
    if isinstance(value, msgspec.Raw):
        return _DECODER.decode(value)
    kind = value.dtype if isinstance(value, np.generic | np.ndarray) else None
    if kind is not None and kind.names is not None:  # tolist() would lose the names
        return [*value] if value.ndim else {name: value[name] for name in kind.names}
    if kind is not None and kind.kind in "mM":
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("times behind a mask are no JSON values; give a list of times and None")
        return _times(np.asarray(value))
    if hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is not type(value):  # numpy's long double has no Python type
            return plain
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _times(values: np.ndarray[Any, Any]) -> Any:
    """Convert numpy's times or durations to Python's, or to ISO 8601 text if Python cannot represent them.

    Raises ValueError for NaT, and for durations that neither can represent.
    """
    if np.isnat(values).any():
        raise ValueError("NaT is no time; give a time or None, or leave it out")
    if not any(isinstance(one, int) for one in values.astype(object).flat):
        return values.tolist()
    unit, step = np.datetime_data(values.dtype)
    is_time = values.dtype.kind == "M"
    if unit == "ns":
        coarse = values.astype("M8[us]" if is_time else "m8[us]")
        if (coarse == values).all():
            return coarse.tolist()
    if is_time:
        return np.asarray(np.datetime_as_string(values)).tolist()
    if unit != "ns":
        raise ValueError(f"a duration in units of {unit!r} has no equal; give one in seconds or nanoseconds")
    return np.frompyfunc(iso_duration, 1, 1)(values.astype(np.int64).astype(object) * step)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_DECODER = msgspec.json.Decoder()
