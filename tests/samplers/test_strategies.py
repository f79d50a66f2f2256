"""Every strategy of the registry against the contract of sampling groups."""

import pytest

from benchmarks.simulation.dynagcs_letter import DynaGCSLetterGroup
from tests.contracts.samplers import SamplingContract
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.samplers import STRATEGIES, SamplingGroup, sampling_group


class _Strategy(SamplingContract):
    strategy: str

    def make_group(self, size: int, capacity: int, seed: int) -> SamplingGroup:
        return sampling_group(self.strategy, size, capacity=capacity, seed=seed)


class TestSharedLog(_Strategy):
    strategy = "shared-log"


class TestDynaGCS(_Strategy):
    strategy = "dynagcs"


class TestDynaGCSLetter(SamplingContract):
    examples = 10  # of the benchmarks only

    def make_group(self, size: int, capacity: int, seed: int) -> SamplingGroup:
        return DynaGCSLetterGroup(size, capacity=capacity, seed=seed)


class TestJoader(_Strategy):
    strategy = "joader"


class TestCoorDL(_Strategy):
    strategy = "coordl"


class TestIndependent(_Strategy):
    strategy = "independent"


def test_every_strategy_is_tested() -> None:
    assert {c.strategy for c in _Strategy.__subclasses__()} == set(STRATEGIES)


def test_strategies_are_found_by_name() -> None:
    for name, group in STRATEGIES.items():
        made = sampling_group(name, 7, capacity=3, seed=1)
        assert type(made) is group
        assert (made.strategy, made.size, made.capacity, made.seed) == (name, 7, 3, 1)


def test_what_makes_no_group_is_refused() -> None:
    with pytest.raises(OptionTypeError, match=r"strategy=\[\] is of type list; give one of \['shared-log'"):
        sampling_group([], 7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="size=1180591620717411303424 is out of range"):
        sampling_group("shared-log", 2**70)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(OptionError, match="'shared-log'"):
        sampling_group("random", 7)
