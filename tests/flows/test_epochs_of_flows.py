"""With a seed in the reader random stages follow the epochs of whichever loader reads, by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset

from tests.flows.flow_cases import Numbers, draw, numbers_flow
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.flows import DataLoadFlowRead, LocalDataLoadFlowReader

_SAMPLES = 8


def _read(cache: int | None = None) -> DataLoadFlowRead:
    flow = numbers_flow(Numbers(_SAMPLES)).map_data("draw", draw)
    return flow.prepare_read(LocalDataLoadFlowReader(seed=7, cache=cache))


def _epoch(loader: Any) -> dict[int, Any]:
    """What was drawn for each sample in one pass."""
    return {sample[0][0]: sample[0][1:] for batch in loader for sample in batch}


def _set_by_hand(epochs: int) -> list[dict[int, Any]]:
    mapped = _read().to_mapped()
    passes = []
    for epoch in range(epochs):
        mapped.set_epoch(epoch)
        passes.append(_epoch([mapped.__getitems__(list(range(_SAMPLES)))]))
    return passes


_WORKERS = [
    pytest.param({}, id="alone"),
    pytest.param({"num_workers": 2}, id="new workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent workers"),
]


@pytest.mark.parametrize("options", _WORKERS)
@pytest.mark.parametrize("loader", [DataLoader, DPFlowDataLoader])
def test_every_pass_draws_anew_and_what_the_seed_says(loader: Any, options: dict[str, Any]) -> None:
    reading = loader(_read().to_mapped(), batch_size=3, shuffle=True, collate_fn=list, **options)
    assert [_epoch(reading) for _ in range(3)] == _set_by_hand(3)


@pytest.mark.slow
def test_torchs_spawned_workers_count_with_those_before_them() -> None:
    reading = DataLoader(_read().to_mapped(), 4, collate_fn=list, num_workers=1, multiprocessing_context="spawn")
    assert [_epoch(reading) for _ in range(2)] == _set_by_hand(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_reads_draw_anew_through_whatever_wraps_them(workers: int) -> None:
    read = _read(cache=_SAMPLES)
    reading = DPFlowDataLoader(Subset(read.to_mapped(), range(_SAMPLES)), 3, collate_fn=list, num_workers=workers)
    assert [_epoch(reading), _epoch(reading)] == _set_by_hand(2)
    shuffled = read.to_shuffled(3, collate_fn=list, num_workers=workers)
    assert [_epoch(shuffled), _epoch(shuffled)] == _set_by_hand(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_goes_on_in_its_epoch(workers: int) -> None:
    first = _read().to_shuffled(2, collate_fn=list, num_workers=workers)
    _epoch(first)
    batches = iter(first)
    begun = _epoch([next(batches)])
    state = first.state_dict()
    resumed = _read().to_shuffled(2, collate_fn=list, num_workers=workers)
    resumed.load_state_dict(state)
    expected = _set_by_hand(3)
    assert {**begun, **_epoch(resumed)} == expected[1]
    assert _epoch(resumed) == expected[2]


@pytest.mark.parametrize("loader", [DataLoader, DPFlowDataLoader])
def test_workers_that_persist_see_an_epoch_that_is_set(loader: Any) -> None:
    mapped = _read().to_mapped()
    reading = loader(mapped, batch_size=3, collate_fn=list, num_workers=1, persistent_workers=True)
    expected = _set_by_hand(5)
    for epoch in (4, 1):
        mapped.set_epoch(epoch)
        assert _epoch(reading) == expected[epoch]


def test_two_loaders_of_one_process_keep_their_epochs_apart() -> None:
    mapped = _read().to_mapped()
    outer, inner = (DPFlowDataLoader(mapped, 4, collate_fn=list) for _ in range(2))
    expected = _set_by_hand(2)
    drawn: dict[int, Any] = {}
    for number, batch in enumerate(outer):
        drawn |= _epoch([batch])
        assert _epoch(inner) == expected[number]
    assert drawn == expected[0]
