"""Where torchdata's StatefulDataLoader was used before."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loader_cases import Indices, StatefulStream, assert_same

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def test_the_same_methods(OurLoader: Any) -> None:
    theirs = stateful.StatefulDataLoader
    added = {name for name in vars(theirs) if not name.startswith("_")} - set(vars(DataLoader))
    assert added == {"state_dict", "load_state_dict"}
    for name in added:
        expected = inspect.signature(getattr(theirs, name)).parameters
        assert list(inspect.signature(getattr(OurLoader, name)).parameters) == list(expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_script_written_for_it_runs_alike(OurLoader: Any, num_workers: int) -> None:
    def run(loader_class: Any) -> list[Any]:
        def loader() -> Any:
            torch.manual_seed(1)
            return loader_class(Indices(20), batch_size=3, shuffle=True, num_workers=num_workers)

        begun = loader()
        seen = []
        for number, batch in enumerate(begun):
            seen.append(batch)
            if number == 2:
                state = begun.state_dict()
                break
        again = loader()
        again.load_state_dict(state)
        return [*seen, *again]

    torch.manual_seed(1)
    expected = list(DataLoader(Indices(20), batch_size=3, shuffle=True, num_workers=num_workers))
    assert_same(run(OurLoader), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_written_for_it_is_resumed(OurLoader: Any, num_workers: int, tmp_path: Any) -> None:
    def rest(loader_class: Any) -> list[Any]:
        def loader(log: str) -> Any:
            return loader_class(StatefulStream(30, str(tmp_path / log)), batch_size=2, num_workers=num_workers)

        begun = loader("first")
        iterator = iter(begun)
        for _ in range(5):
            next(iterator)
        state = begun.state_dict()
        again = loader("second")
        again.load_state_dict(state)
        return list(again)

    assert_same(rest(OurLoader), rest(stateful.StatefulDataLoader))
