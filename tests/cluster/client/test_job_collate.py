"""A batch put together by one thread is the batch that torch's default collate makes."""

from __future__ import annotations

import weakref
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from torch_dpflow.cluster.client.collate import collate_function, collate_samples

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
    torch.testing.assert_close(collate_samples(samples), default_collate(samples), rtol=0, atol=0)
    assert type(collate_samples(samples)) is type(default_collate(samples))


def test_errors_are_torchs() -> None:
    samples = [torch.zeros(BIG), torch.zeros(BIG + 1)]
    with pytest.raises(RuntimeError) as theirs:
        default_collate(samples)
    with pytest.raises(RuntimeError) as ours:
        collate_samples(samples)
    assert str(ours.value) == str(theirs.value)


def test_a_function_of_the_users_is_left_alone() -> None:
    assert collate_function(len) is len
    assert collate_function(None) is collate_function(default_collate) is collate_samples


def in_a_row(count: int, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    """Tensors one behind the other in memory that nothing else refers to."""
    return list((torch.arange(count * BIG) % 251).to(dtype).reshape(count, BIG))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_tensors_in_a_row_become_the_batch_without_a_copy(dtype: torch.dtype) -> None:
    samples = in_a_row(3, dtype)
    expected, address = default_collate(samples), samples[0].data_ptr()
    batch = collate_samples(samples)
    assert torch.equal(batch, expected)
    assert (batch.dtype, batch.shape, batch.data_ptr()) == (dtype, (3, BIG), address)
    assert batch.untyped_storage().nbytes() == batch.nbytes


def test_the_batch_keeps_the_memory_of_its_samples() -> None:
    memory = np.arange(2 * BIG, dtype=np.uint8)
    watched = weakref.ref(memory)
    batch = collate_samples([torch.from_numpy(memory[:BIG]), torch.from_numpy(memory[BIG:])])
    del memory
    assert watched() is not None
    assert int(batch[1, 7]) == (BIG + 7) % 256
    del batch
    assert watched() is None


def test_a_tensor_that_a_sample_holds_twice_makes_two_batches() -> None:
    first, second = collate_samples([(one, one) for one in in_a_row(2)])
    assert torch.equal(first, second)
    first.zero_()
    assert second.any()


@pytest.mark.parametrize("order", [[1, 0], [0, 2], [0, 0], [0]], ids=["back", "gap", "twice", "single"])
def test_what_is_not_in_a_row_is_copied(order: list[int]) -> None:
    row = in_a_row(3)
    samples = [row[place] for place in order]
    batch = collate_samples(samples)
    assert torch.equal(batch, default_collate(samples))
    assert batch.data_ptr() != samples[0].data_ptr()


@pytest.mark.parametrize(
    "sample",
    [image(1.0), torch.ones(3), torch.ones(3, 4).t(), np.ones(5), np.float32(1), 1, 1.0, np.ones(BIG)],
    ids=["tensor", "small", "transposed", "array", "scalar", "int", "float", "large array"],
)
def test_an_array_of_a_batch_outlives_that_the_batch_is_shared(sample: Any) -> None:
    """As with torch's workers, whose batches are in shared memory from the start."""
    batch = collate_samples([sample, sample])
    array = batch.numpy()
    place, expected = array.ctypes.data, default_collate([sample, sample])
    assert batch.stride() == expected.stride()
    freed = weakref.ref(batch.untyped_storage().memory)
    batch.share_memory_()
    assert freed() is not None
    assert place == freed().ctypes.data
    assert np.array_equal(array, expected.numpy())
    del array, batch
    assert freed() is None
