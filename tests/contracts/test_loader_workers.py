"""What the code inside a worker sees, and what the loader's worker arguments do."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.loader_cases import Gated, Indices, Rows, WhoLoads, assert_same, epochs
from tests.new_process import held_by_child, in_fork, run_interpreter
from tests.shared_cluster import wait
from tests.worker_cases import worker_pids
from torch_dpflow import LoaderOptions
from torch_dpflow.errors import StateError

FORK = multiprocessing.get_context("fork")


class Reporting(Indices):
    """Item `i` tells what a worker's code can see."""

    label = "not set"

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "dataset is self": info.dataset is self,
            "label": self.label,
            "threads": torch.get_num_threads(),
            "daemon": multiprocessing.current_process().daemon,
            "parent": os.getppid(),
        }


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def set_label(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.label = f"set by {worker}"


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For torch's operators in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_info(Loader: Any, num_workers: int) -> None:
    def run(loader_class: Any) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        loader = loader_class(
            Reporting(4 * num_workers),
            batch_size=1,
            num_workers=num_workers,
            collate_fn=as_it_is,
            worker_init_fn=set_label,
        )
        return [sample for batch in loader for sample in batch]

    reported = run(Loader)
    assert_same(reported, run(DataLoader))
    assert {sample["label"] for sample in reported} == {f"set by {worker}" for worker in range(num_workers)}
    assert {sample["parent"] for sample in reported} == {os.getpid()}
    assert get_worker_info() is None


def test_worker_info_is_there_for_collation_too(Loader: Any) -> None:
    loader = Loader(Indices(4), batch_size=2, num_workers=1, collate_fn=worker_number)
    assert list(loader) == [0, 0]


def worker_number(_samples: list[Any]) -> int:
    info = get_worker_info()
    assert info is not None
    return info.id


def test_worker_init_fn_is_called_once_a_worker(Loader: Any, tmp_path: Any) -> None:
    calls = tmp_path / "calls"

    def note(worker: int) -> None:
        with calls.open("a") as file:
            file.write(f"{worker} {os.getpid()}\n")

    loader = Loader(Indices(20), num_workers=2, worker_init_fn=note, persistent_workers=True)
    epochs(loader, 3)
    workers = [line.split() for line in calls.read_text().splitlines()]
    assert sorted(worker for worker, _pid in workers) == ["0", "1"]
    assert len({pid for _worker, pid in workers}) == 2


#: Forkserver: `test_loader_randomness` compares what its workers load.
@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_start_methods(Loader: Any, method: str | None) -> None:
    rows = Rows(5)
    loader = Loader(rows, batch_size=2, num_workers=1, multiprocessing_context=method)
    assert_same(list(loader), list(DataLoader(rows, batch_size=2)))


#: The start method that Python has by default from 3.14 on; no argument of the loader names it.
FORKSERVER = """
import multiprocessing
from torch.utils.data import DataLoader
from tests.loader_cases import Rows, assert_same
from tests.worker_cases import kill, worker_pids
from torch_dpflow import DPFlowDataLoader

multiprocessing.set_start_method("forkserver")
expected = list(DataLoader(Rows(60), batch_size=4))
loader = DPFlowDataLoader(Rows(60), batch_size=4, num_workers=1, persistent_workers=True)
for epoch in range(2):
    assert_same(list(loader), expected)
batches = []
for batch in loader:
    batches.append(batch)
    if len(batches) == 2:
        kill(worker_pids()[0])
assert_same(batches, expected)
print("restarts:", loader.stats().restarts)
"""


@pytest.mark.slow
def test_under_the_default_start_method_of_later_pythons() -> None:
    done = run_interpreter(FORKSERVER, fresh=True)
    assert (done.returncode, done.stdout) == (0, "restarts: 1\n"), done.stderr


def test_a_context_object(Loader: Any) -> None:
    loader = Loader(Indices(3), batch_size=None, num_workers=2, multiprocessing_context=FORK)
    assert list(loader) == [0, 1, 2]


def test_forked_workers_need_nothing_that_can_be_pickled(Loader: Any) -> None:
    class Local(Dataset[int]):
        def __init__(self) -> None:
            self.file = open(os.devnull)  # noqa: SIM115 - it is here because it cannot be pickled
            self.function = lambda index: index * 2

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return int(self.function(index))

    dataset = Local()
    with dataset.file:
        loader = Loader(
            dataset,
            batch_size=2,
            num_workers=1,
            multiprocessing_context="fork",
            collate_fn=lambda samples: samples,
            worker_init_fn=lambda worker: None,
        )
        assert list(loader) == [[0, 2], [4, 6]]


def test_workers_of_a_finished_epoch_can_be_asked_how_they_ended(Loader: Any, tmp_path: Path) -> None:
    def meet(worker: int) -> None:
        # Both are to be there before the first batch is: one that is not yet when the epoch ends is not waited for.
        (tmp_path / str(worker)).touch()
        wait(lambda: len(list(tmp_path.iterdir())) == 2, what="the other worker")

    given: dict[str, Any] = {"multiprocessing_context": FORK, "worker_init_fn": meet}
    iterator = iter(Loader(Indices(8), batch_size=2, num_workers=2, **given))
    pids = [worker.pid for worker in iterator._workers]
    assert len(list(iterator)) == 4
    assert [worker.pid for worker in iterator._workers] == pids
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]


def test_persistent_workers_stay(Loader: Any) -> None:
    def processes(loader: Any) -> list[set[int]]:
        return [{int(pid) for _index, _worker, pid in loader} for _ in range(3)]

    kept = Loader(WhoLoads(30), num_workers=2, persistent_workers=True)
    first, *later = processes(kept)
    there = set(worker_pids())
    assert len(there) == 2
    assert all(pids <= there for pids in (first, *later))
    assert iter(kept) is iter(kept)
    afresh = processes(Loader(WhoLoads(30), num_workers=2))
    assert len(set.union(*afresh)) == sum(len(pids) for pids in afresh)


def test_persistent_workers_do_not_see_later_changes(Loader: Any) -> None:
    dataset = Rows(4, width=1)
    kept = Loader(dataset, num_workers=2, persistent_workers=True)
    list(kept)
    dataset.width = 5
    assert {vectors.shape for _, vectors, _ in kept} == {(1, 1)}
    assert {vectors.shape for _, vectors, _ in Loader(dataset, num_workers=2)} == {(1, 5)}


def test_out_of_order_delivery_does_not_wait_for_a_slow_batch(Loader: Any) -> None:
    gate = FORK.Event()
    loader = Loader(Gated(8, {0: gate}), batch_size=None, num_workers=2, in_order=False)
    iterator = iter(loader)
    early = [next(iterator) for _ in range(3)]
    assert 0 not in early
    gate.set()
    assert sorted([*early, *iterator]) == list(range(8))


def test_in_order_delivery_waits_for_a_slow_batch(Loader: Any) -> None:
    gate, passed = FORK.Event(), FORK.Event()
    loader = Loader(Opening(8, {0: gate}, opens=gate, passed=passed), batch_size=None, num_workers=2)
    assert list(loader) == list(range(8))
    assert passed.is_set(), "another worker went on while the first was held up"


class Opening(Gated):
    """Index 3, the second of the second worker, opens the gate that holds up index 0."""

    def __init__(self, size: int, gates: dict[int, Any], *, opens: Any, passed: Any) -> None:
        super().__init__(size, gates)
        self.opens = opens
        self.passed = passed

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.passed.set()
            self.opens.set()
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_every_item_once_in_either_order(Loader: Any, in_order: bool, persistent_workers: bool) -> None:
    loader = Loader(Indices(101), batch_size=3, num_workers=3, in_order=in_order, persistent_workers=persistent_workers)
    for epoch in epochs(loader, 2):
        seen = [int(index) for batch in epoch for index in batch]
        assert sorted(seen) == list(range(101))
        if in_order:
            assert seen == list(range(101))


def test_a_loader_without_workers_may_be_used_inside_a_worker(Loader: Any) -> None:
    class Nesting(Indices):
        def __getitem__(self, index: int) -> int:
            return sum(Loader(Indices(index + 1), batch_size=None))

    assert list(Loader(Nesting(5), batch_size=None, num_workers=2)) == [0, 1, 3, 6, 10]


def test_a_loader_with_workers_inside_a_worker_is_refused_as_by_torch(Loader: Any) -> None:
    class Nesting(Indices):
        def __getitem__(self, index: int) -> int:
            return sum(Loader(Indices(index + 1), batch_size=None, num_workers=1))

    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        list(Loader(Nesting(2), batch_size=None, num_workers=1))


@pytest.mark.usefixtures("two_threads")
def test_work_after_fork_of_a_process_that_has_computed(Loader: Any) -> None:
    class Convolving(Indices):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.nn.functional.conv1d(torch.ones(1, 1, 2400), torch.ones(1, 1, 2))

    dataset = Convolving(2)
    expected = dataset[0]
    for batch in Loader(dataset, batch_size=None, num_workers=1):
        assert_same(batch, expected)


def test_processor_affinity_can_be_set_in_worker_init_fn(Loader: Any) -> None:
    chosen = max(os.sched_getaffinity(0))

    class Affinity(Indices):
        def __getitem__(self, index: int) -> list[int]:
            return sorted(os.sched_getaffinity(0))

    loader = Loader(
        Affinity(4),
        batch_size=None,
        num_workers=2,
        worker_init_fn=lambda _: os.sched_setaffinity(0, [chosen]),
    )
    assert list(loader) == [[chosen]] * 4


@pytest.mark.parametrize("num_workers", [1, 2])
def test_with_worker_init_fn_batches_go_round_robin(Loader: Any, num_workers: int) -> None:
    """Who sets up workers by number relies on torch's assignment."""

    def remember(worker: int) -> None:
        return None

    loader = Loader(WhoLoads(12), batch_size=2, num_workers=num_workers, worker_init_fn=remember)
    assert [set(workers.tolist()) for _, workers, _ in loader] == [{n % num_workers} for n in range(6)]


class Loads(Indices):
    """Notes every load in a file; some items take longer than others."""

    def __init__(self, size: int, log: Path) -> None:
        super().__init__(size)
        self.log = log

    def __getitem__(self, index: int) -> Any:
        with open(self.log, "a") as log:
            log.write(f"{index}\n")
        time.sleep(0.003 if index % 7 == 0 else 0.0)
        return super().__getitem__(index)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_what_is_loaded_twice_is_counted_and_can_be_turned_off(OurLoader: Any, seeding: Any, tmp_path: Path) -> None:
    """An idle worker takes a waiting batch from another, which may have begun it: that one is loaded twice."""
    log, size, batch_size, rounds = tmp_path / "loads", 64, 4, 15
    loader = OurLoader(
        Loads(size, log),
        batch_size=batch_size,
        num_workers=3,
        persistent_workers=True,
        options=LoaderOptions(seeding=seeding),
    )
    for _ in range(rounds):
        assert torch.cat(list(loader)).tolist() == list(range(size))
    loader._iterator._shutdown_workers()
    loads, stats = log.read_text().split(), loader.stats()
    assert set(loads) == set(map(str, range(size)))
    # A worker ends what it has begun before it stops, and that result comes too late to be counted.
    beyond = len(loads) - rounds * size
    assert stats.duplicates * batch_size <= beyond <= (stats.duplicates + stats.steals) * batch_size
    if seeding == "worker":
        assert beyond == 0


class ThreadWorker(threading.Thread):
    """Looks like a process to torch's iterator, as libraries make them whose transforms share memory."""

    @property
    def pid(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class ThreadQueue(queue.Queue[Any]):
    """Looks like a queue between processes."""

    def close(self) -> None:
        """Nothing is to be closed."""

    def cancel_join_thread(self) -> None:
        """No thread is there to be joined."""


class ThreadContext(SpawnContext):
    """Starts threads."""

    Process: Any = ThreadWorker
    Queue: Any = ThreadQueue


def read_by_threads(loader_class: Any) -> list[int]:
    loader = loader_class(Indices(20), batch_size=4, num_workers=2, multiprocessing_context=ThreadContext())
    iterator = iter(loader)
    assert sum(type(thread) is ThreadWorker for thread in threading.enumerate()) == 2
    return [index for batch in iterator for index in batch.tolist()]


def test_workers_that_are_threads(Loader: Any) -> None:
    """In a process of its own: torch's worker takes the process's generators and signals for its own."""
    assert in_fork(read_by_threads, Loader) == list(range(20))


def test_workers_that_are_threads_have_no_state(OurLoader: Any) -> None:
    loader = OurLoader(Indices(20), num_workers=2, multiprocessing_context=ThreadContext())
    state = OurLoader(Indices(20)).state_dict()
    for ask in (loader.state_dict, lambda: loader.load_state_dict(state)):
        with pytest.raises(StateError, match="multiprocessing_context='ThreadContext' are threads"):
            ask()


class Filled(Dataset[torch.Tensor]):
    """Sample `i` is 100 kB of `i // 2`: its batches of two are sent through shared memory."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((25_000,), index // 2, dtype=torch.int32)


class Keeps(Indices):
    """Item `i` is what the kept batch holds by then, once the gate is open."""

    def __init__(self, batch: torch.Tensor, gate: Any) -> None:
        super().__init__(1)
        self.batch, self.gate = batch, gate

    def __getitem__(self, index: int) -> list[int]:
        self.gate.wait()
        return values(self.batch)


def values(batch: Any) -> list[int]:
    return sorted({*batch.reshape(-1).tolist()})


@pytest.mark.parametrize("method", ["os.fork", "Process"])
def test_a_forked_child_keeps_the_batch_that_it_holds(Loader: Any, method: str) -> None:
    batches = iter(Loader(Filled(), batch_size=2, num_workers=2))
    held = [next(batches) for _ in range(2)]
    with held_by_child(method, lambda: [values(one) for one in held]) as looked:
        held.clear()
        assert [values(batch) for batch in batches] == [[number] for number in range(2, 30)]
        assert looked() == [[0], [1]]


def test_a_second_loader_s_workers_keep_a_batch_of_the_first(Loader: Any) -> None:
    batches = iter(Loader(Filled(), batch_size=2, num_workers=2))
    gate = FORK.Event()
    keeps = Keeps(next(batches), gate)
    second = iter(Loader(keeps, batch_size=None, num_workers=1, multiprocessing_context="fork", collate_fn=as_it_is))
    del keeps.batch
    assert [values(batch) for batch in batches] == [[number] for number in range(1, 30)]
    gate.set()
    assert [*second] == [[0]]


@pytest.mark.parametrize("how", ["share_memory_", "queue", "pool"])
def test_an_array_of_a_batch_can_be_read_after_the_batch_was_sent(Loader: Any, how: str) -> None:
    numbers = [[number] for number in range(30)]
    # In a process of its own: torch shares descriptors by a thread that stays.
    assert in_fork(arrays_of_sent_batches, Loader, how) == (numbers, numbers, numbers)


def arrays_of_sent_batches(Loader: Any, how: str) -> tuple[Any, Any, Any]:
    """The values of arrays, of their batches, and of what was received."""
    kept: list[tuple[Any, torch.Tensor]] = []
    received: list[list[int]] = []
    sent = torch.multiprocessing.get_context("fork").SimpleQueue()
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        for batch in Loader(Filled(), batch_size=2, num_workers=2):
            kept.append((batch.numpy(), batch))
            if how == "share_memory_":
                received.append(values(batch.share_memory_()))
            elif how == "queue":
                sent.put(batch)
                received.append(values(sent.get()))
            else:
                received.append(pool.submit(values, batch).result())
    return [values(array) for array, _ in kept], [values(batch) for _, batch in kept], received
