"""Error messages for batches and datasets that cannot be pickled: which part, where it is, and what to do."""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torch_dpflow._core.attributes import working
from torch_dpflow.errors import NotPicklableError
from torch_dpflow.ipc.serialization.pickling import PayloadPickler

#: Most objects that are pickled on trial in the search for the culprit.
_MOST_TRIALS = 10_000
_DEEPEST = 50


def explain(obj: Any, error: Exception, *, name: str = "batch") -> NotPicklableError:
    """The error for `obj`, which the message calls `name` and whose pickling raised `error`."""
    path, culprit, reason = _find_culprit(obj, error, name, lambda part: PayloadPickler().dump(part))
    return _error_of(path, culprit, reason, _advice(culprit))


def explain_loading(
    loads: Mapping[str, Any], error: Exception, *, dump: Callable[[Any], object], workers: str
) -> NotPicklableError:
    """The error for what `workers` load, whose parts have names in the message, and for which `dump` raised `error`."""
    for name, obj in loads.items():
        failure = _failure_of(obj, dump)
        if failure is not None:
            path, culprit, reason = _find_culprit(obj, failure, name, dump)
            return _error_of(path, culprit, reason, _loading_advice(culprit, workers))
    return _error_of(" and ".join(loads), loads, error, _loading_advice(loads, workers))


def _error_of(path: str, culprit: Any, reason: Exception, advice: str) -> NotPicklableError:
    kind = type(culprit)
    return NotPicklableError(
        f"{path} of type {kind.__module__}.{kind.__qualname__} cannot be pickled, so it cannot be sent to "
        f"another process: {reason}. {advice}"
    )


def _find_culprit(
    obj: Any, error: Exception, path: str, dump: Callable[[Any], object]
) -> tuple[str, Any, Exception]:
    """Descend to the part that cannot be pickled while all of its own parts can."""
    trials = 0
    above: set[int] = set()
    for _ in range(_DEEPEST):
        above.add(id(obj))
        for step, part in parts_of(obj):
            trials += 1
            if trials > _MOST_TRIALS:
                return path, obj, error
            if id(part) in above:
                continue
            failure = _failure_of(part, dump)
            if failure is not None:
                path, obj, error = path + step, part, failure
                break
        else:
            break
    return path, obj, error


def _failure_of(obj: Any, dump: Callable[[Any], object]) -> Exception | None:
    try:
        dump(obj)
    except Exception as error:
        return error
    return None


def parts_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with what follows the object's name in its own."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, tuple) and isinstance(fields := working(obj, "_fields"), tuple):
        yield from ((f".{field}", value) for field, value in zip(fields, obj, strict=False))
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    if not isinstance(obj, type | types.FunctionType | types.ModuleType):
        attributes: dict[str, Any] = working(obj, "__dict__", {})
        yield from ((f".{attribute}", value) for attribute, value in attributes.items())


def _advice(culprit: Any) -> str:
    if isinstance(culprit, torch.Tensor):
        return "Call .detach() on it first, or .to_dense() if its layout is the reason"
    if isinstance(culprit, type | types.FunctionType | types.MethodType):
        return "Define it at the top level of a module that the training process can import"
    if isinstance(culprit, io.IOBase | types.GeneratorType):
        return "Keep it out of the batch and return what is read from it"
    return (
        "Return tensors, arrays, numbers, strings or containers of them, or give the class a __getstate__ "
        "that leaves out what belongs to one process"
    )


def _loading_advice(culprit: Any, workers: str) -> str:
    where = f"The workers of {workers} are not forked from this process"
    if isinstance(culprit, types.FunctionType | types.MethodType):
        return f"{where}: make inside the function what it takes along from where it is defined"
    return f"{where}: make it where the first sample is read, and give the class a __getstate__ that leaves it out"
