"""Nothing accumulates: the process holds after many epochs what it held after none."""

from __future__ import annotations

import gc
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.holdings import Holdings
from tests.loader_cases import Failing, Indices, Rows, Stream
from tests.new_process import run_interpreter
from tests.worker_cases import has_ended, kill, worker_pids


def consume(loader: Any, batches: int | None = None) -> None:
    for _ in itertools.islice(loader, batches):
        pass


@pytest.mark.parametrize("dataset", [Rows(40, 50_000), Stream(40)], ids=["map", "iterable"])
@pytest.mark.parametrize("batches", [None, 7], ids=["whole epochs", "left early"])
def test_ten_epochs(Loader: Any, eventually: Any, dataset: Any, batches: int | None) -> None:
    loader = Loader(dataset, batch_size=4, num_workers=2)
    gc.collect()
    before = Holdings.now()
    for _ in range(10):
        consume(loader, batches)
    eventually(lambda: not Holdings.now().beyond(before), what=f"an end of {Holdings.now().beyond(before)}")


def test_ten_epochs_of_persistent_workers(Loader: Any, eventually: Any) -> None:
    loader = Loader(Rows(40, 50_000), batch_size=4, num_workers=2, persistent_workers=True)
    consume(loader)
    gc.collect()
    before = Holdings.now()
    assert len(before.processes) >= 2
    for _ in range(10):
        consume(loader)
    assert len(Holdings.now().descriptors) == len(before.descriptors)
    assert Holdings.now().processes == before.processes
    assert Holdings.now().threads == before.threads
    assert Holdings.now().temporaries == before.temporaries
    pids = worker_pids()
    del loader
    gc.collect()
    eventually(lambda: all(map(has_ended, pids)), what="the end of the workers")


def test_ten_failing_epochs(OurLoader: Any, eventually: Any) -> None:
    loader = OurLoader(Failing(40, {10: ValueError("bad value")}), batch_size=4, num_workers=2)
    gc.collect()
    before = Holdings.now()
    for _ in range(10):
        with pytest.raises(ValueError, match="bad value"):
            consume(loader)

    def all_is_gone() -> bool:
        # Traceback and exception hold each other, as with torch's loader; and while another thread collects such
        # cycles, this call does nothing.
        gc.collect()
        return not Holdings.now().beyond(before)

    eventually(all_is_gone, what="an end of what the epochs held")


def test_loaders_that_are_made_and_dropped(Loader: Any, eventually: Any) -> None:
    gc.collect()
    before = Holdings.now()
    for number in range(10):
        Loader(Indices(8), num_workers=1, persistent_workers=bool(number % 2))
        iter(Loader(Indices(8), num_workers=1, persistent_workers=bool(number % 2)))
    gc.collect()
    eventually(lambda: not Holdings.now().beyond(before), what=f"an end of {Holdings.now().beyond(before)}")


def test_the_workers_are_gone_as_soon_as_the_epoch_is_over(OurLoader: Any) -> None:
    loader = OurLoader(Indices(8), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    pids = worker_pids()
    assert len(pids) == 2
    consume(iterator)
    assert all(map(has_ended, pids))


class Leaving(Indices):
    """Starts a process that outlives its worker, and holds its descriptors."""

    def __getitem__(self, index: int) -> int:
        if pid := os.fork():
            return pid
        os.setsid()
        time.sleep(60)
        os._exit(0)


def test_a_process_that_a_worker_leaves_keeps_nothing_open(OurLoader: Any) -> None:
    gc.collect()
    before = Holdings.now().descriptors
    (left,) = OurLoader(Leaving(1), batch_size=None, num_workers=1)
    try:
        assert Holdings.now().descriptors <= before
    finally:
        kill(left)


def test_a_shard_is_closed_twice_and_by_several_threads(OurLoader: Any) -> None:
    iterator = iter(OurLoader(Indices(40), num_workers=2))
    next(iterator)
    pids = worker_pids()
    with ThreadPoolExecutor(3) as pool:
        for closed in [pool.submit(iterator._shard.close) for _ in range(3)]:
            closed.result(150)
    iterator._shard.close()
    assert all(map(has_ended, pids))


def test_a_loader_is_collected_while_threadings_own_lock_is_held() -> None:
    # As by `threading.enumerate()` when the garbage collector runs inside it; threads take that lock to end.
    program = """if True:
        import gc, threading
        from tests.loader_cases import Indices
        from tests.worker_cases import has_ended, worker_pids
        from torch_dpflow import DPFlowDataLoader

        iterator = iter(DPFlowDataLoader(Indices(40), num_workers=2))
        next(iterator)
        cycle = [iterator]
        cycle.append(cycle)
        gc.disable()
        pids = worker_pids()
        del iterator, cycle
        with threading._active_limbo_lock:
            gc.collect()
        assert all(map(has_ended, pids))
    """
    ended = run_interpreter(program, destructors=True)
    assert (ended.returncode, ended.stderr) == (0, "")
