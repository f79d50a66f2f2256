"""Whatever is lent, published, opened and dropped, and in which order: every byte stays where it belongs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from torch_dpflow.ipc.memory.arena import Arena, Block
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import BlockRef

BUDGET = 2_000_000


class ArenaMachine(RuleBasedStateMachine):
    """Both ends of an arena against a plain record of who wrote what."""

    lent = Bundle("lent")
    sent = Bundle("sent")
    seen = Bundle("seen")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(budget_bytes=BUDGET)
        self.reader = ArenaReader(os.getpid())
        self.marks = 0
        #: Everything that is in use: the memory as its user sees it, and what must be in it.
        self.used: list[tuple[np.ndarray[Any, Any], int]] = []

    @rule(target=lent, nbytes=st.sampled_from([1, 1000, 65_000, 65_472, 65_473, 70_000, 200_000, 900_000]))
    def lend(self, nbytes: int) -> Any:
        block = self.arena.allocate(nbytes)
        if block is None:
            return multiple()
        assert block.memory.nbytes == nbytes
        self.marks = (self.marks + 1) % 256
        block.memory[:] = self.marks
        self.used.append((block.memory, self.marks))
        return block, self.marks

    @rule(lent=consumes(lent))
    def throw_away(self, lent: tuple[Block, int]) -> None:
        self.stop_using(lent[0].memory)

    @rule(target=sent, lent=consumes(lent), keep=st.booleans())
    def publish(self, lent: tuple[Block, int], keep: bool) -> tuple[BlockRef, int]:
        block, mark = lent
        ref = self.arena.publish(block)
        if not keep:
            self.stop_using(block.memory)
        return ref, mark

    @rule(target=seen, sent=consumes(sent))
    def open(self, sent: tuple[BlockRef, int]) -> np.ndarray[Any, Any]:
        ref, mark = sent
        view = self.reader.view(ref)
        assert view.nbytes == ref.nbytes
        self.used.append((view, mark))
        return view

    @rule(sent=consumes(sent))
    def discard(self, sent: tuple[BlockRef, int]) -> None:
        self.reader.release(sent[0])

    @rule(view=consumes(seen))
    def drop(self, view: np.ndarray[Any, Any]) -> None:
        self.stop_using(view)

    def stop_using(self, memory: np.ndarray[Any, Any]) -> None:
        self.used = [entry for entry in self.used if entry[0] is not memory]

    @invariant()
    def what_is_in_use_is_untouched(self) -> None:
        assert all(bool(np.all(memory == mark)) for memory, mark in self.used)

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.arena.allocated_bytes <= BUDGET
        assert sum(segment.size for segment in self.reader._segments.values()) <= 2 * BUDGET


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
