"""A worker ends after the script has changed the dataset: its replacement loads the same samples as the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from torch.utils.data import Subset

from tests.loader_cases import Indices
from tests.worker_cases import kill, worker_pids
from torch_dpflow.loader.first_state import FirstState


class Scaled(Indices):
    """Sample `i` is `i` times the scale."""

    scale = 1

    def __getitem__(self, index: int) -> int:
        return index * self.scale


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_epoch_mixes_two_states(OurLoader: Any, method: str, persistent: bool) -> None:
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
    seen.extend(iterator)
    assert seen == list(range(1000))
    assert loader.stats().restarts == 1
    assert dataset.scale == -1
    sign = 1 if persistent else -1  # persistent workers keep their copies, as torch's do
    assert list(loader) == [sign * index for index in range(1000)]


class Holder:
    """Attributes of many kinds."""

    def __init__(self) -> None:
        self.level, self._opened, self.own = 1, cast(Any, None), self
        self.parts, self.settings, self.pair = [1.5, "a"], {"size": 3, "rate": 2}, ([1], 2)
        self.names = ["x"] * 1000


def _append(one: Holder) -> None:
    one.parts.append("b")


def _change_inside(one: Holder) -> None:
    one.pair[0][0], one.settings["size"] = 7, 4


CHANGES: list[Callable[[Holder], object]] = [
    lambda one: vars(one).update(level=2),
    lambda one: vars(one).update(_opened=object()),
    lambda one: vars(one).update(added=5),
    lambda one: vars(one).pop("level"),
    lambda one: vars(one).update(names=["y"]),
    lambda one: one.settings.update(size=one.settings.pop("size")),
    _append,
    _change_inside,
]


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_are_as_they_were_within_the_block_and_as_they_are_behind_it(
    change: Callable[[Holder], object],
) -> None:
    one = Holder()
    before, state = repr(_shown(one)), FirstState(one)
    change(one)
    after = repr(_shown(one))
    assert after != before
    with state.restored():
        assert repr(_shown(one)) == before
    assert repr(_shown(one)) == after


def test_a_value_that_the_block_replaces_is_kept() -> None:
    one = Holder()
    state = FirstState(one)
    one.level, one._opened, one.names = 2, object(), ["y"]
    one.parts.append("b")
    with state.restored():
        one._opened, one.level = "closed", 5  # as a `__getstate__` may
        one.parts.append("c")
    assert (one.level, one._opened, one.names, one.parts) == (5, "closed", ["y"], [1.5, "a", "c"])


def _shown(one: Holder) -> dict[str, Any]:
    return {name: value for name, value in sorted(vars(one).items()) if name != "own"}


def test_what_is_cyclic_deep_or_large_is_looked_at_within_bounds() -> None:
    chain: Any = None
    for _ in range(5_000):
        holder = Holder()
        holder.own = chain
        chain = holder
    wide = Holder()
    wide.parts = [chain] * 5_000
    for one in (chain, wide):
        with FirstState(one).restored():
            pass
