"""DynaGCSSampler keeps its place in torchdata's StatefulDataLoader."""

from __future__ import annotations

from typing import Any

import pytest

from torch_dpflow.samplers import DynaGCSSampler


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def new_loader() -> Any:
        return stateful.StatefulDataLoader(range(40), batch_size=4, sampler=DynaGCSSampler(range(40), seed=1))

    loader = new_loader()
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    resumed = new_loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest
    assert sorted(index for batch in first + rest for index in batch) == list(range(40))
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_saved_between_epochs_leaves_none_out() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def new_loader() -> Any:
        return stateful.StatefulDataLoader(range(40), batch_size=4, sampler=DynaGCSSampler(range(40), seed=1))

    loader, resumed = new_loader(), new_loader()
    list(loader)
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]
