"""Whatever happens to a loader, in whatever order: its batches are those of an undisturbed run.

A state machine takes batches, leaves and begins epochs, kills workers, saves, and resumes with other worker
counts. The model is a table of what an undisturbed loader with one worker delivers, and a position in it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.loader_cases import Augmented, assert_same
from tests.worker_cases import kill, worker_pids

SIZE = 13
BATCHES = 5
STEPS = 20
EPOCHS = STEPS + 1


def make(loader_class: Any, num_workers: int, persistent_workers: bool) -> Any:
    return loader_class(
        Augmented(SIZE),
        batch_size=3,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        generator=torch.Generator(),
    )


def begun(loader: Any, epoch: int) -> Any:
    """An iteration whose order does not depend on how much of the last one was drawn when it was left."""
    loader.generator.manual_seed(epoch)
    return iter(loader)


@functools.cache
def undisturbed(loader_class: Any, persistent_workers: bool) -> list[list[Any]]:
    loader = make(loader_class, 1, persistent_workers)
    return [list(begun(loader, epoch)) for epoch in range(EPOCHS)]


class LoaderMachine(RuleBasedStateMachine):
    """One loader at a time; `position` counts batches of the running epoch, `epoch` the epochs begun."""

    loader_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.iterator: Any = None
        self.epoch = -1
        self.position = 0
        self.finished = False  # the loop has seen the end: a state is one of the next epoch from then on
        self.saved: tuple[Any, int, int] | None = None

    @initialize(num_workers=st.integers(1, 3), persistent_workers=st.booleans())
    def begin(self, num_workers: int, persistent_workers: bool) -> None:
        # For good: as in torch, kept workers keep their seed, so that later epochs' orders are drawn otherwise.
        self.persistent_workers = persistent_workers
        self.expected = undisturbed(self.loader_class, persistent_workers)
        self.replace_loader(num_workers)

    def replace_loader(self, num_workers: int) -> None:
        self.iterator = None
        self.loader = make(self.loader_class, num_workers, self.persistent_workers)

    @rule()
    def begin_an_epoch(self) -> None:
        self.iterator = None  # the old one's workers need not overlap with the new one's
        self.epoch, self.position, self.finished = self.epoch + 1, 0, False
        self.iterator = begun(self.loader, self.epoch)

    @precondition(lambda self: self.iterator is not None)
    @rule(batches=st.integers(1, BATCHES))
    def take(self, batches: int) -> None:
        for _ in range(batches):
            due = self.expected[self.epoch][self.position : self.position + 1]
            assert_same(list(next_or_nothing(self.iterator)), due, f"epoch {self.epoch}, batch {self.position}")
            self.position += len(due)
            self.finished = not due

    @rule(which=st.integers(0, 2))
    def kill_a_worker(self, which: int) -> None:
        pids = worker_pids()
        if which < len(pids):
            kill(pids[which])

    @precondition(lambda self: self.iterator is not None and not self.finished)
    @rule()
    def save(self) -> None:
        self.saved = self.loader.state_dict(), self.epoch, self.position

    @precondition(lambda self: self.saved is not None)
    @rule(num_workers=st.integers(1, 3), same=st.booleans())
    def resume(self, num_workers: int, same: bool) -> None:
        assert self.saved is not None
        if not same:
            self.replace_loader(num_workers)
        state, self.epoch, self.position = self.saved
        self.finished = False
        self.loader.load_state_dict(state)
        self.iterator = None
        self.iterator = iter(self.loader)

    def teardown(self) -> None:
        self.iterator = self.loader = None
        gc.collect()


def next_or_nothing(iterator: Any) -> Any:
    with contextlib.suppress(StopIteration):
        yield next(iterator)


@pytest.mark.parametrize("examples", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_any_history_leads_to_the_same_batches(OurLoader: Any, examples: int) -> None:
    machine = type("Machine", (LoaderMachine,), {"loader_class": OurLoader})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
