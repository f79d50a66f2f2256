"""Source nodes, functions and comparisons that the tests of `torch_dpflow.nodes` share; workers import them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchdata.nodes import BaseNode

from torch_dpflow.nodes import Mapper


class Counting(BaseNode[Any]):
    """Yields (epoch, number). Raises what `errors` has for a number, and continues after it."""

    def __init__(self, size: int, errors: dict[int, Exception] | None = None) -> None:
        super().__init__()
        self.size = size
        self.errors = errors or {}
        self.epoch = -1
        self.number = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is None:
            self.epoch, self.number = self.epoch + 1, 0
        else:
            self.epoch, self.number = initial_state["at"]

    def next(self) -> tuple[int, int]:
        if self.number == self.size:
            raise StopIteration
        self.number += 1
        if self.number - 1 in self.errors:
            raise self.errors[self.number - 1]
        return self.epoch, self.number - 1

    def get_state(self) -> dict[str, Any]:
        return {"at": [self.epoch, self.number]}


class Unsized(Counting):
    """Moves to its next epoch only if items were requested in the present one, as torchdata's `SamplerWrapper`."""

    was_read = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        was_read, self.was_read = self.was_read, False
        epoch = self.epoch
        super().reset(initial_state)
        if initial_state is None and not was_read:
            self.epoch = max(0, epoch)

    def next(self) -> tuple[int, int]:
        self.was_read = True
        return super().next()


def negative(item: tuple[int, int]) -> tuple[int, int]:
    """A function of an item that no worker can confuse with the item."""
    return item[0], -item[1]


def drawn(item: tuple[int, int]) -> tuple[tuple[int, int], float, float]:
    """Draws random numbers."""
    return item, random.random(), float(torch.rand(()))


def unhurried(item: tuple[int, int]) -> tuple[int, int]:
    """Takes different times, so that items overtake each other."""
    time.sleep(0.001 * (7 * item[1] % 5))
    return negative(item)


def awkward(item: tuple[int, int]) -> tuple[int, int]:
    """Fails for some items, each in another way."""
    match item[1]:
        case 2:
            raise KeyError("no such row")
        case 3:
            next(iter(()))  # raises StopIteration
        case 5:
            os.kill(os.getpid(), signal.SIGKILL)
    return negative(item)


def results_of(node: Any) -> Iterator[Any]:
    """The results of an epoch; errors in their places."""
    while True:
        try:
            yield next(node)
        except StopIteration:
            return
        except Exception as error:
            yield error


def check_contract(make: Callable[[], Any], size: int, *, restored: Callable[[], Any] | None = None) -> None:
    """Check the contract of a node of torchdata: `reset`, `next` and `state_dict`, also at an epoch's two ends.

    Args:
        make: makes the node, always alike.
        size: items in an epoch.
        restored: makes the nodes that states are restored in; None: as `make`.
    """
    node = make()
    states, items = [node.state_dict()], []  # it resets itself
    for item in node:
        items.append(item)
        states.append(node.state_dict())
    assert len(items) == size
    for _ in range(2):
        with_end = node.state_dict()
        try:
            next(node)
        except StopIteration:
            continue
        raise AssertionError("an epoch goes on after its end")
    node.reset()
    following = list(node)
    node.reset()
    next(node, None)
    node.reset()  # in mid-epoch
    assert len(list(node)) == size == len(following)

    node = (restored or make)()
    for position, state in enumerate(states):
        node.reset(state)
        assert node.state_dict().keys() == state.keys()
        assert list(node) == items[position:], f"restored at {position}"
    node.reset()
    assert list(node) == following, "the epoch after that of a restored state"
    node.reset(with_end)
    assert list(node) == []
    assert next(node, None) is None
    node.reset(node.state_dict())
    assert list(node) == []
    node.reset()
    assert list(node) == following, "the epoch after a restored end"


def check_kills(platform: Any, size: int) -> None:
    """A worker is killed, and later the mapper is left; another one goes on where it was."""
    sign = -1  # of a closure, which pickle alone could not send

    def with_process(item: tuple[int, int]) -> tuple[int, int, int]:
        return item[0], sign * item[1], os.getpid()

    got: list[Any] = []
    state = None
    pids = set()
    for workers, last in ((2, size // 2), (1, size)):
        node = Mapper(Counting(size), with_process, workers, platform=platform)
        node.reset(state)
        while len(got) < last:
            *result, pid = next(node)
            got.append(tuple(result))
            pids.add(pid)
            if len(got) == size // 6:
                os.kill(pid, signal.SIGKILL)
        state = node.state_dict()
        node.shutdown()
    assert got == [(0, -number) for number in range(size)]
    assert os.getpid() not in pids
    assert len(pids) >= 3
