"""Random augmentation: keyed by batch, or torch's own streams where they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from tests.loader_cases import Augmented, Stream, assert_same, epochs, global_rng, seed_everything
from torch_dpflow.options import LoaderOptions

SIZE = 30


def augmented_epochs(loader_class: Any, *, seed: int = 0, count: int = 2, **arguments: Any) -> list[list[Any]]:
    seed_everything(seed)
    return epochs(loader_class(Augmented(SIZE), batch_size=4, shuffle=True, **arguments), count)


def test_augmentation_does_not_depend_on_the_number_of_workers(OurLoader: Any) -> None:
    with_one = augmented_epochs(OurLoader, num_workers=1)
    for num_workers in (2, 3):
        assert_same(augmented_epochs(OurLoader, num_workers=num_workers), with_one)


def test_augmentation_does_not_depend_on_persistence_prefetching_or_start_method(OurLoader: Any) -> None:
    reference = augmented_epochs(OurLoader, num_workers=1, count=1)
    for arguments in (
        {"persistent_workers": True},
        {"prefetch_factor": 5},
        {"num_workers": 1, "multiprocessing_context": "forkserver"},  # each imports torch
    ):
        assert_same(augmented_epochs(OurLoader, **{"num_workers": 2, "count": 1, **arguments}), reference)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_every_epoch_and_every_seed_augments_afresh(OurLoader: Any, persistent_workers: bool) -> None:
    def draws(epoch: list[Any]) -> set[float]:
        return {float(value) for _, *values in epoch for column in values for value in column}

    loaded = [
        draws(epoch)
        for seed in (0, 1)
        for epoch in augmented_epochs(OurLoader, seed=seed, num_workers=2, persistent_workers=persistent_workers)
    ]
    assert all(len(values) == 3 * SIZE for values in loaded)
    assert len(set.union(*loaded)) == 4 * 3 * SIZE


def test_batches_of_one_epoch_draw_different_numbers(OurLoader: Any) -> None:
    (epoch,) = augmented_epochs(OurLoader, num_workers=3, count=1)
    first_draws = [float(batch[3][0]) for batch in epoch]
    assert len(set(first_draws)) == len(first_draws)


@pytest.mark.parametrize(("num_workers", "persistent_workers"), [(1, False), (1, True), (2, True), (3, False)])
def test_worker_seeding_equals_torchs_bit_for_bit(OurLoader: Any, num_workers: int, persistent_workers: bool) -> None:
    arguments = {"num_workers": num_workers, "persistent_workers": persistent_workers}
    expected = augmented_epochs(DataLoader, **arguments)
    assert_same(augmented_epochs(OurLoader, options=LoaderOptions(seeding="worker"), **arguments), expected)


def test_without_workers_augmentation_equals_torchs(Loader: Any) -> None:
    assert_same(augmented_epochs(Loader, num_workers=0), augmented_epochs(DataLoader, num_workers=0))


def reseed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert torch.initial_seed() == info.seed, "worker_init_fn is called after seeding"
    seed_everything(info.seed % 1000)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_with_a_worker_init_fn_seeding_is_the_users(Loader: Any, num_workers: int) -> None:
    arguments = {"num_workers": num_workers, "worker_init_fn": reseed}
    assert_same(augmented_epochs(Loader, **arguments), augmented_epochs(DataLoader, **arguments))


def test_batch_seeding_can_be_kept_with_a_worker_init_fn(OurLoader: Any) -> None:
    keyed = LoaderOptions(seeding="batch")
    reference = augmented_epochs(OurLoader, num_workers=1)
    assert_same(augmented_epochs(OurLoader, num_workers=2, worker_init_fn=reseed, options=keyed), reference)


@pytest.mark.parametrize(
    ("num_workers", "persistent_workers", "batch_size"),
    # Each two values meet.
    [(1, False, None), (1, True, 4), (2, True, None), (2, False, 4), (3, False, None), (3, True, 4)],
)
def test_an_iterable_datasets_random_draws_equal_torchs(
    Loader: Any, num_workers: int, persistent_workers: bool, batch_size: int | None
) -> None:
    def run(loader_class: Any) -> list[list[Any]]:
        seed_everything(3)
        dataset = Stream(20, augment=True)
        loader = loader_class(
            dataset, batch_size=batch_size, num_workers=num_workers, persistent_workers=persistent_workers
        )
        return epochs(loader, 2)

    assert_same(run(Loader), run(DataLoader))


def test_the_training_process_keeps_its_own_random_state(Loader: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = Loader(Augmented(SIZE), batch_size=4, shuffle=True, num_workers=2, generator=generator)
    before = global_rng()
    epochs(loader, 1)
    assert global_rng() == before
