"""A heap with stale entries is what a sorted dictionary is."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.invariants import validate
from torch_dpflow._core.lazy_heap import LazyHeap

ITEMS = st.integers(0, 30)
RANKS = st.integers(-5, 5)


class Ranked(RuleBasedStateMachine):
    """Items come, move and leave; the first is always the one of the lowest rank."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: LazyHeap[int] = LazyHeap()
        self.ranks: dict[int, tuple[int, int]] = {}

    @rule(item=ITEMS, rank=RANKS)
    def push(self, item: int, rank: int) -> None:
        self.heap.push(item, rank, item)
        self.ranks[item] = (rank, item)

    @rule(item=ITEMS)
    def discard(self, item: int) -> None:
        assert self.heap.discard(item) == (self.ranks.pop(item, None) is not None)

    @rule(item=ITEMS, ranks=st.lists(RANKS, min_size=40, max_size=80))
    def move_often(self, item: int, ranks: list[int]) -> None:
        for rank in ranks:
            self.push(item, rank)

    @rule()
    def empty(self) -> None:
        while self.heap:
            first = self.heap.first()
            assert first == min(self.ranks, key=lambda item: self.ranks[item])
            self.discard(first)
        assert not self.ranks

    @invariant()
    def agrees(self) -> None:
        validate(self.heap)
        assert len(self.heap) == len(self.ranks)
        assert set(self.heap) == set(self.ranks)
        assert all(item in self.heap for item in self.ranks)
        if self.ranks:
            assert self.heap.first() == min(self.ranks, key=lambda item: self.ranks[item])


TestRanked = Ranked.TestCase
TestRanked.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
