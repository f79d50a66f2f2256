"""Annotations as JSON; values of numpy and torch are converted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from torch_dpflow._core.depth import TOO_DEEP, check_json
from torch_dpflow.errors import SourceError


def encode_annotations(meta: Mapping[str, Any], name: str) -> msgspec.Raw:
    """Annotations as a JSON object; `name` names the sample in errors.

    Raises:
        SourceError: they are no mapping, or have values that JSON cannot hold, such as NaN.
    """
    try:
        encoded = _ENCODER.encode(meta)
        # NaN and infinity are written as null.
        check_json(encoded)
        wrong = next(_not_finite(meta, ""), None) if b"null" in encoded else None
    except RecursionError as error:  # nor can they be shown
        raise SourceError(f"the annotations of {name} cannot be kept: {TOO_DEEP}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise SourceError(
            f"the annotations of {name} cannot be written as JSON: {error}: {meta!r:.500}"
        ) from error
    if not encoded.startswith(b"{"):
        raise SourceError(f"the annotations of {name} are no mapping: {meta!r:.500}")
    if wrong is not None:
        raise SourceError(
            f"the annotations of {name} have {wrong[0]}={wrong[1]!r}, which JSON cannot hold; give a finite number or "
            f"None, or leave it out: {meta!r:.500}"
        )
    return msgspec.Raw(encoded)


def _not_finite(value: Any, field: str) -> Iterator[tuple[str, float]]:
    """Every number that is not finite, and its field."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield field, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for position, inner in enumerate(value):
            yield from _not_finite(inner, f"{field}[{position}]")
    elif hasattr(value, "tolist"):
        yield from _not_finite(value.tolist(), field)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON value")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
