"""Objects that cannot travel are named, with their places in the batch."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch

from torch_dpflow.errors import NotPicklableError
from torch_dpflow.ipc.serialization.codec import encode


class Point(NamedTuple):
    x: Any
    y: Any


def in_lambda() -> Any:
    return lambda: None


class Locked:
    def __init__(self) -> None:
        self.name = "n"
        self.state = {"lock": threading.Lock()}


class Refusing:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


UNPICKLABLE = {
    "lambda": (
        {"meta": [1, 2, 3, in_lambda()]},
        r"batch\['meta'\]\[3\] of type builtins.function .*top level",
    ),
    "lock": ([Locked()], r"batch\[0\]\.state\['lock'\] of type _thread.lock .*__getstate__"),
    "generator": ((1, (n for n in "ab")), r"batch\[1\] of type builtins.generator .*what is read from it"),
    "file": (Point(1, sys.__stdin__), r"batch\.y of type _io.TextIOWrapper .*what is read from it"),
    "graph": ({"x": torch.ones(2, requires_grad=True) * 2}, r"batch\['x'\] of type torch.Tensor .*detach"),
    "refusal": ([[Refusing()]], r"batch\[0\]\[0\] of type .*Refusing .*not me"),
    "whole": (in_lambda(), r"^batch of type builtins.function"),
}


@pytest.mark.parametrize(("obj", "message"), UNPICKLABLE.values(), ids=UNPICKLABLE)
def test_what_cannot_be_pickled_is_named(obj: Any, message: str) -> None:
    with pytest.raises(NotPicklableError, match=message) as caught:
        encode(obj)
    assert caught.value.__cause__ is not None
    pickle.loads(pickle.dumps(caught.value))


def test_a_batch_that_contains_itself_and_cannot_be_pickled() -> None:
    loop: list[Any] = [1]
    loop += [loop, in_lambda()]
    with pytest.raises(NotPicklableError, match=r"batch\[2\]"):
        encode(loop)
