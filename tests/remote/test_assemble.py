"""A batch put together by one thread is the batch that torch's default collate makes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from torch_dpflow.remote.assemble import assemble, assembler

Pair = namedtuple("Pair", "image label")
BIG = 40_000


def image(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((3, BIG // 3), value).to(dtype)


@pytest.mark.parametrize(
    "samples",
    [
        [(image(1.0), 0), (image(2.0), 1)],
        [{"image": image(1.0, torch.uint8), "label": 1}, {"image": image(2.0, torch.uint8), "label": 2}],
        [Pair(image(1.0, torch.bfloat16), 1.5), Pair(image(2.0, torch.bfloat16), 2.5)],
        [image(1.0, torch.bool), image(0.0, torch.bool)],
        [image(1.0, torch.complex64), image(2.0, torch.complex64)],
        [image(1.0).t(), image(2.0).t()],
        [np.full(BIG, 1.0), np.full(BIG, 2.0)],
        [torch.zeros(3), torch.ones(3)],
        [torch.zeros(0), torch.zeros(0)],
    ],
    ids=["tuple", "dict", "named", "bool", "complex", "transposed", "numpy", "small", "empty"],
)
def test_batches_equal_torchs(samples: list[Any]) -> None:
    torch.testing.assert_close(assemble(samples), default_collate(samples), rtol=0, atol=0)
    assert type(assemble(samples)) is type(default_collate(samples))


def test_errors_are_torchs() -> None:
    samples = [torch.zeros(BIG), torch.zeros(BIG + 1)]
    with pytest.raises(RuntimeError) as theirs:
        default_collate(samples)
    with pytest.raises(RuntimeError) as ours:
        assemble(samples)
    assert str(ours.value) == str(theirs.value)


def test_a_function_of_the_users_is_left_alone() -> None:
    assert assembler(len) is len
    assert assembler(None) is assembler(default_collate) is assemble
