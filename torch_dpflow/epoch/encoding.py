"""A state's values as one text, so that the state has the same keys and kinds of values at every position.

torch's distributed checkpoint loads by the keys that a new loader's state has, and may store the values of one key from
one rank and those of another key from another. One text is stored whole or not at all.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from typing import Any

import torch

from torch_dpflow.errors import StateError

_PLAIN = (str, int, float, bool, type(None))


class HeldObjects:
    """Own states of datasets and samplers that no text can hold; pickled with the state."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldObjects) and bool(self.values == other.values)

    __hash__ = None  # type: ignore[assignment]


def is_plain(value: Any) -> bool:
    """Whether JSON returns the value as it is: no tuples, no keys but text, no types of others."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def packed(value: Any, objects: list[Any]) -> Any:
    """Return the own state of a dataset or sampler as plain data; None stays None.

    Tensors and other values that `torch.load` accepts with `weights_only` become text; anything else joins `objects`.
    """
    if value is None:
        return None
    if is_plain(value):
        return {"plain": value}
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        objects.append(value)
        return {"object": len(objects) - 1}
    return {"torch": base64.b64encode(buffer.getvalue()).decode("ascii")}


def unpacked(value: Any, objects: list[Any]) -> Any:
    """Undo `packed`. Raises StateError if the value is damaged."""
    try:
        if value is None:
            return None
        ((form, content),) = value.items()
        if form == "plain":
            return content
        if form == "object":
            return objects[content]
        if form == "torch":
            return torch.load(io.BytesIO(base64.b64decode(content, validate=True)), weights_only=True)
        raise ValueError(f"form {form!r}")
    except Exception as error:
        raise StateError(f"the state is damaged: the own state of a dataset or sampler: {error!r:.200}") from error


def as_text(values: dict[str, Any]) -> str:
    """Return plain values as text."""
    return json.dumps(values, separators=(",", ":"))


def from_text(text: Any) -> dict[str, Any]:
    """Undo `as_text`. Raises StateError if it is damaged."""
    try:
        values = json.loads(text)
        if type(values) is not dict:
            raise ValueError(f"{type(values).__name__} in place of a dict")
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is damaged: its text cannot be read: {error}") from error
    return values
