"""What samples weigh, and copies that share nothing."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torch_dpflow.caches.store import duplicate, measure
from torch_dpflow.errors import OptionTypeError

MEGA = 1_000_000

Box = namedtuple("Box", ["left", "right"])


class Colour(Enum):
    RED = 1


@dataclass
class Record:
    pixels: np.ndarray
    label: int


class Slotted:
    __slots__ = ("pixels",)

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels


def pixels() -> np.ndarray:
    return np.zeros(MEGA, dtype=np.uint8)


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.zeros(MEGA, dtype=torch.uint8), MEGA),
        (torch.zeros(4 * MEGA, dtype=torch.uint8)[::4], MEGA),
        (torch.eye(1000, dtype=torch.float64).to_sparse(), 1000 * (8 + 16)),
        (pixels(), MEGA),
        (np.zeros(4 * MEGA, dtype=np.uint8)[::4], MEGA),
        (np.array([b"x" * MEGA, None], dtype=object), MEGA),
        (b"x" * MEGA, MEGA),
        (bytearray(MEGA), MEGA),
        (memoryview(bytes(MEGA)), MEGA),
        ("x" * MEGA, MEGA),
        (Image.new("L", (1000, 1000)), MEGA),
        (Image.new("RGB", (1000, 250)), MEGA),
        (Image.new("I;16", (1000, 500)), MEGA),
        ([pixels(), 3], MEGA),
        ({"image": pixels(), "label": 3}, MEGA),
        ((Box(pixels(), 3), None), MEGA),
        (deque([pixels()]), MEGA),
        ({b"x" * MEGA}, MEGA),
        (Record(pixels(), 3), MEGA),
        (Slotted(pixels()), MEGA),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_a_sample_weighs_what_it_holds(sample: Any, size: int) -> None:
    assert size <= measure(sample) < size + 2000


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_compressed_tensor_weighs_its_components() -> None:
    sample = torch.eye(1000, dtype=torch.float64).to_sparse_csr()
    size = 1000 * (8 + 8) + 1001 * 8
    assert size <= measure(sample) < size + 2000


def test_what_is_there_twice_weighs_once() -> None:
    one = pixels()
    assert measure([one, one]) < 1.01 * MEGA
    assert measure([one, one.copy()]) > 2 * MEGA


def test_a_sample_that_holds_itself_has_a_weight() -> None:
    sample: list[Any] = [pixels()]
    sample.append(sample)
    assert MEGA < measure(sample) < 1.01 * MEGA
    copied = duplicate({"cycle": OrderedDict(self=sample)})
    assert copied["cycle"]["self"][1] is copied["cycle"]["self"]


def test_the_program_weighs_nothing() -> None:
    assert measure([np, pixels, Record, threading.Lock]) < 500


def write_to(sample: Any) -> None:
    """Change whatever can be changed."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        sample[...] = 99
    elif isinstance(sample, Image.Image):
        sample.putpixel((0, 0), 99)
    elif isinstance(sample, bytearray):
        sample[:] = b"c"
    elif isinstance(sample, dict):
        for value in sample.values():
            write_to(value)
        sample.clear()
    elif isinstance(sample, Record):
        write_to(sample.pixels)
        sample.label = 99
    elif isinstance(sample, tuple):
        for value in sample:
            write_to(value)
    elif isinstance(sample, list):
        for value in sample:
            write_to(value)
        sample.clear()


def make(kind: str) -> Any:
    return {
        "tensor": lambda: torch.arange(6.0).reshape(2, 3),
        "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
        "array": lambda: np.arange(6).reshape(2, 3),
        "fortran": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
        "objects": lambda: np.array([[1, 2], None], dtype=object),
        "image": lambda: Image.new("L", (3, 2), 7),
        "bytearray": lambda: bytearray(b"a"),
        "list": lambda: [torch.ones(2), [np.ones(2)], "text", Colour.RED],
        "dict": lambda: {"x": torch.ones(2), "y": {"z": [1, 2]}},
        "box": lambda: Box(np.ones(2), [torch.ones(1)]),
        "record": lambda: Record(np.ones(2), 3),
    }[kind]()


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.stride() == right.stride()
    if isinstance(left, np.ndarray):
        return left.tolist() == right.tolist() and left.strides == right.strides
    if isinstance(left, Image.Image):
        return left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Record):
        return same(left.pixels, right.pixels) and left.label == right.label
    return bool(left == right)


KINDS = [
    "tensor", "transposed", "array", "fortran", "objects", "image",
    "bytearray", "list", "dict", "box", "record",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_a_copy_does_not_reach_the_sample(kind: str) -> None:
    sample = make(kind)
    copied = duplicate(sample)
    assert same(copied, make(kind))
    write_to(copied)
    assert same(sample, make(kind))
    copied = duplicate(sample)
    write_to(sample)
    assert same(copied, make(kind))


def test_a_copy_shares_within_itself_what_the_sample_shares() -> None:
    one = np.ones(2)
    copied = duplicate([one, {"again": one}])
    assert copied[0] is copied[1]["again"]
    assert copied[0] is not one


def test_a_copy_forgets_the_graph_but_not_that_a_gradient_is_wanted() -> None:
    leaf = torch.ones(2, requires_grad=True)
    copied = duplicate(leaf * 2)
    assert copied.is_leaf
    assert copied.requires_grad


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(OptionTypeError, match=r"type dict cannot be copied.*copy=False"):
        duplicate({"lock": threading.Lock()})
