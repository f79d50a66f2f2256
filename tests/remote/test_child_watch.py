"""The thread that tells of the end of processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterator
from multiprocessing.resource_tracker import ensure_running

import pytest

from torch_dpflow.remote.services.child_watch import Child, ChildWatch

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture
def told() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def watch(told: queue.Queue[str]) -> Iterator[ChildWatch]:
    watch = ChildWatch(lambda: told.put("ended"))
    yield watch
    watch.close()


def sleeper(watch: ChildWatch) -> Child:
    process = CONTEXT.Process(target=time.sleep, args=(600.0,), daemon=True)
    process.start()
    child = Child(process)
    watch.add(child)
    return child


def test_every_end_is_told_of_once(told: queue.Queue[str]) -> None:
    watch = ChildWatch(lambda: told.put("ended"))
    children = [sleeper(watch) for _ in range(3)]
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        assert told.get(timeout=30.0) == "ended"
        assert child.bury() == -signal.SIGKILL
    watch.close()  # whatever else it has to tell it has told then
    assert told.empty()


def test_a_process_that_was_closed_since_takes_nothing_from_the_others(
    watch: ChildWatch, told: queue.Queue[str]
) -> None:
    first = sleeper(watch)
    first.kill()
    assert told.get(timeout=30.0) == "ended"
    first.bury()
    second = sleeper(watch)  # whose descriptor may have the number of the first one's
    second.kill()
    assert told.get(timeout=30.0) == "ended"
    second.bury()


def test_nothing_is_told_and_nothing_stays_open_after_the_end(told: queue.Queue[str]) -> None:
    ensure_running()  # or its descriptor would be new
    before = set(os.listdir("/proc/self/fd"))
    watch = ChildWatch(lambda: told.put("ended"))
    child = sleeper(watch)
    watch.close()
    child.kill()
    assert child.has_ended(30.0)
    child.bury()
    assert told.empty()
    assert set(os.listdir("/proc/self/fd")) <= before
