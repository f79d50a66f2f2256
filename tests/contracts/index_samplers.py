"""The contract suites of samplers whose epochs are dealt to ranks, of mixtures and of batches by budget.

Subclass one, make a sampler, and let pytest collect it::

    class TestMyMixture(MixtureContract):
        def make_mixture(self, lengths, weights, **options):
            return MyMixture(lengths, weights, **options)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError, StateError


class IndexSampler(Protocol):
    """What the suites call."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None: ...


#: Makes the sampler of one rank: `num_replicas`, `rank`, and `seed` or `drop_last`.
Make = Callable[..., IndexSampler]

#: The class of a suite is the executor of its tests; suites that inherit a test run it each.
_settings = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
_ranks = st.integers(1, 9)


def deal(make: Make, ranks: int, epoch: int = 0, **options: Any) -> list[IndexSampler]:
    """Return the samplers of all ranks, at this epoch."""
    samplers = [make(num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def _item(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


def _read(samplers: Iterable[IndexSampler], steps: int | None = None) -> list[Any]:
    """Return what the ranks read in so many steps, step by step; None: until the end."""
    parts = [list(map(_item, islice(iter(sampler), steps))) for sampler in samplers]
    assert len({len(part) for part in parts}) == 1, "ranks read equally much"
    return list(chain.from_iterable(zip_longest(*parts)))


class EpochSamplerContract:
    """Epochs by seed and number, dealt to ranks, which any number of ranks continues from a small state."""

    def make(self, *, num_replicas: int, rank: int, seed: int = 0, drop_last: bool = False) -> IndexSampler:
        """Return a sampler of an epoch of at least 20 items that differ."""
        raise NotImplementedError(f"{type(self).__name__} must say how a sampler is made")

    def epoch(self, epoch: int = 0, seed: int = 0) -> Counter[Any]:
        """Return the items of an epoch, as one rank reads them."""
        return Counter(_read(deal(self.make, 1, epoch, seed=seed)))

    @_settings
    @given(ranks=_ranks, epoch=st.integers(0, 5), drop_last=st.booleans())
    def test_ranks_share_an_epoch(self, ranks: int, epoch: int, drop_last: bool) -> None:
        """Each item once, but for fewer than `ranks` that are repeated or left out."""
        whole = self.epoch(epoch)
        samplers = deal(self.make, ranks, epoch, drop_last=drop_last)
        read = _read(samplers)
        self._check(Counter(read), whole, ranks, drop_last)
        assert len(read) == ranks * len(samplers[0])

    def test_epochs_are_functions_of_seed_and_number(self) -> None:
        orders = [[_read(deal(self.make, 1, epoch, seed=seed)) for epoch in (0, 1, 0)] for seed in (0, 1)]
        for first, second, again in orders:
            assert first == again != second
        assert orders[0][0] != orders[1][0]

    def test_without_ranks_iterations_are_epochs(self) -> None:
        sampler = self.make(num_replicas=None, rank=None)  # type: ignore[arg-type]
        for epoch in range(2):
            assert [*map(_item, sampler)] == _read(deal(self.make, 1, epoch))

    @_settings
    @given(data=st.data(), ranks=_ranks)
    def test_a_state_continues_an_epoch(self, data: st.DataObject, ranks: int) -> None:
        position = data.draw(st.integers(0, len(self.make(num_replicas=ranks, rank=0))))
        samplers = deal(self.make, ranks, 2)
        before = _read(samplers, position)
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
        again = [self.make(num_replicas=ranks, rank=rank) for rank in range(ranks)]
        for sampler, state in zip(again, states):
            sampler.load_state_dict(state)
        whole = _read(deal(self.make, ranks, 2))
        if position == len(samplers[0]):
            assert before == whole
        else:
            assert before + _read(again) == whole
        for sampler in again:
            sampler.set_epoch(3)
        assert _read(again) == _read(deal(self.make, ranks, 3))

    @_settings
    @given(data=st.data(), sizes=st.lists(_ranks, min_size=2, max_size=4), drop_last=st.booleans())
    def test_other_ranks_continue_an_epoch(self, data: st.DataObject, sizes: list[int], drop_last: bool) -> None:
        """Each item once through any changes of size; evened out at the end alone."""
        samplers = deal(self.make, sizes[0], 1, drop_last=drop_last)
        read: list[Any] = []
        whole = self.epoch(1)
        for size in sizes[1:]:
            # A step is left for each of the sizes: with nothing left, ranks would begin a whole epoch.
            spare = max(0, whole.total() - len(read) - max(sizes))
            read += _read(samplers, data.draw(st.integers(0, spare // len(samplers))))
            state = samplers[0].state_dict()
            samplers = [self.make(num_replicas=size, rank=rank, drop_last=drop_last) for rank in range(size)]
            for sampler in samplers:
                sampler.load_state_dict(state)
        self._check(Counter(read + _read(samplers)), whole, sizes[-1], drop_last)
        for sampler in samplers:
            sampler.set_epoch(2)
        assert _read(samplers) == _read(deal(self.make, sizes[-1], 2, drop_last=drop_last))

    def test_states_of_ranks_out_of_step_are_merged(self) -> None:
        samplers = deal(self.make, 3, 1)
        read = [_item(item) for rank, sampler in enumerate(samplers) for item in islice(sampler, 1 + 2 * rank)]
        states = [sampler.state_dict() for sampler in samplers]
        again = [self.make(num_replicas=2, rank=rank) for rank in range(2)]
        for sampler in again:
            sampler.load_state_dict(states)
        self._check(Counter(read + _read(again)), self.epoch(1), 2, drop_last=False)

    def test_a_state_is_no_larger_deep_in_a_run(self) -> None:
        (sampler,) = deal(self.make, 1, 1000)
        _read([sampler], 15)
        assert len(json.dumps(sampler.state_dict())) < 1000

    def test_other_states_are_refused(self) -> None:
        sampler = self.make(num_replicas=2, rank=0)
        state = sampler.state_dict()
        other = self.make(num_replicas=2, rank=0, seed=1).state_dict()
        wrong: list[Any] = [{}, other, {**state, "position": -1}, {**state, "epoch": None}, 7, []]
        for one in wrong:
            with pytest.raises(StateError):
                sampler.load_state_dict(one)
        assert sampler.state_dict() == state

    def _check(self, read: Counter[Any], whole: Counter[Any], ranks: int, drop_last: bool) -> None:
        missing, repeated = whole - read, read - whole
        assert not repeated if drop_last else not missing
        assert repeated.keys() <= whole.keys()
        assert (missing + repeated).total() < ranks


class MixtureContract(EpochSamplerContract):
    """Samplers of several sources: positions in their concatenation, in exact proportion."""

    def make_mixture(self, lengths: Sequence[int], weights: Sequence[float], **options: Any) -> IndexSampler:
        """Return a sampler of sources of these lengths; options: `samples` and those of `make`."""
        raise NotImplementedError(f"{type(self).__name__} must say how a mixture is made")

    def make(self, *, num_replicas: int, rank: int, seed: int = 0, drop_last: bool = False) -> IndexSampler:
        return self.make_mixture(
            [40, 7, 90],
            [5, 3, 2],
            samples=97,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            drop_last=drop_last,
        )

    @_settings
    @given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=7).filter(any))
    def test_each_source_has_its_share_of_any_prefix(self, weights: list[int]) -> None:
        """But for less than one sample, at any number of samples since the run began."""
        sampler, total = (
            self.make_mixture([10] * len(weights), weights, samples=60, num_replicas=1, rank=0),
            sum(weights),
        )
        drawn, n = [0] * len(weights), 0
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for n, position in enumerate(sampler, start=60 * epoch + 1):
                drawn[position // 10] += 1
                assert all(abs(count * total - n * weight) < total for count, weight in zip(drawn, weights))
        assert sum(drawn) == n == 180

    def test_each_source_is_read_in_epochs_of_its_own(self) -> None:
        sampler = self.make_mixture([5, 30], [1, 1], samples=50, num_replicas=1, rank=0)
        read: list[list[int]] = [[], []]
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for position in sampler:
                read[position >= 5].append(position)
        for part, own in zip(read, (range(5), range(5, 35))):
            epochs = [part[at : at + len(own)] for at in range(0, len(part) - len(own) + 1, len(own))]
            assert all(sorted(each) == list(own) for each in epochs)
            assert epochs[0] != epochs[1]

    @pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")], [1, 2, 3]])
    def test_weights_that_are_none_are_refused(self, weights: list[float]) -> None:
        with pytest.raises(OptionError):
            self.make_mixture([5, 5], weights)


class BudgetContract(EpochSamplerContract):
    """Batch samplers that fill batches by a budget: each batch costs its number of samples times its longest one."""

    def make_batches(self, lengths: Sequence[float], budget: float, **options: Any) -> IndexSampler:
        """Return a batch sampler of samples of these lengths; options: as of `make`."""
        raise NotImplementedError(f"{type(self).__name__} must say how a batch sampler is made")

    def make(self, *, num_replicas: int, rank: int, seed: int = 0, drop_last: bool = False) -> IndexSampler:
        lengths = [1 + 7 * number % 40 for number in range(300)]
        return self.make_batches(lengths, 100, num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)

    @_settings
    @given(lengths=st.lists(st.integers(1, 50) | st.floats(0.1, 50), min_size=1, max_size=200), epoch=st.integers(0, 9))
    def test_an_epoch_has_each_sample_once_within_the_budget(self, lengths: list[float], epoch: int) -> None:
        sampler = self.make_batches(lengths, 50, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler), "the number of batches is known, and the same in every epoch"
        assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
        assert all(len(batch) * max(lengths[at] for at in batch) <= 50 for batch in batches)

    def test_batches_of_a_step_cost_about_the_same(self) -> None:
        lengths = [10 + number % 90 for number in range(4000)]
        steps = list(zip(*deal(lambda **given: self.make_batches(lengths, 800, **given), 4)))
        costs = [[len(batch) * max(lengths[at] for at in batch) for batch in step] for step in steps]
        assert sum(max(step) for step in costs) * 4 <= 1.05 * sum(map(sum, costs))

    def test_a_sample_above_the_budget_is_named(self) -> None:
        with pytest.raises(OptionError, match=r"\[2\]=60"):
            self.make_batches([1, 2, 60, 3], 50)

    @pytest.mark.parametrize("lengths", [[], [1, 0], [1, -1], [1, float("nan")]])
    def test_lengths_that_are_none_are_refused(self, lengths: list[float]) -> None:
        with pytest.raises(OptionError):
            self.make_batches(lengths, 50)
