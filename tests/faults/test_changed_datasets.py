"""A worker ends after the script has changed the dataset: its replacement would load other samples than the others."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Subset

from tests.loader_cases import Indices
from tests.worker_cases import kill, worker_pids
from torch_dpflow.errors import WorkerStartError
from torch_dpflow.loader.dataset_changes import PlainState


class Scaled(Indices):
    """Sample `i` is `i` times the scale."""

    scale = 1

    def __getitem__(self, index: int) -> int:
        return index * self.scale


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_epoch_mixes_both_states(OurLoader: Any, method: str, persistent: bool) -> None:
    dataset = Scaled(1000)
    loader = OurLoader(
        Subset(dataset, range(1000)),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(3)]
    dataset.scale = -1
    kill(worker_pids()[-1])
    with pytest.raises(WorkerStartError, match=r"dataset\.dataset\.scale is -1 and was 1.*begin the epoch again"):
        seen.extend(iterator)
    assert seen == list(range(len(seen)))
    assert list(loader) == [-index for index in range(1000)], "a later epoch has the new state in all workers"


class Holder:
    """Attributes of many kinds."""

    def __init__(self) -> None:
        self.level, self._opened, self.parts, self.own = 1, 0, [1.5, "a"], self
        self.names = ["x"] * 1000


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("one.level = 2", "dataset.level is 2 and was 1"),
        ("one.level = True", "dataset.level is True and was 1"),
        ("one.parts[1] = 'b'", "dataset.parts[1] is 'b' and was 'a'"),
        ("one.names.append('y')", "dataset.names's length is 1001 and was 1000"),
        ("one._opened = 5", ""),
        ("one.file = 5", ""),
        ("del one.level", ""),
        ("one.level = 1", ""),
    ],
)
def test_changes_of_public_values_are_noticed(change: str, expected: str) -> None:
    one = Holder()
    state = PlainState(one)
    exec(change)
    assert state.changed(one) == expected
