"""Samples that take their worker down, workers that cannot begin, and workers that hang."""

from __future__ import annotations

import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.loader_cases import Announced, Deadly, Gated, Indices, Samples, Stream, patiently
from tests.new_process import FORK, in_fork
from tests.shared_datasets import Hanging
from tests.worker_cases import has_ended, kill, worker_pids
from torch_dpflow.errors import LoaderTimeoutError, PoisonTaskError, WorkerError, WorkerStartError
from torch_dpflow.loader.private_shard import PrivateShard
from torch_dpflow.loader.shard_events import Died
from torch_dpflow.loader.worker_iterator import WorkerIterator
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.options import LoaderOptions

DEATHS = {
    "segmentation fault": {"by_signal": signal.SIGSEGV},
    "killed": {"by_signal": signal.SIGKILL},
    "exit code": {"by_exit": 7},
    "exit without complaint": {"by_exit": 0},
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_batch_that_kills_is_named_and_given_up(OurLoader: Any, death: str, num_workers: int) -> None:
    dataset = Deadly(40, 17, **DEATHS[death])
    loader = OurLoader(dataset, batch_size=4, num_workers=num_workers)
    iterator = iter(loader)
    assert [int(index) for _ in range(4) for index in next(iterator)] == list(range(16))
    with pytest.raises(PoisonTaskError, match="17") as raised:
        next(iterator)
    assert "3 workers" in str(raised.value)
    assert [int(index) for batch in iterator for index in batch] == list(range(20, 40))
    assert loader.stats().restarts >= 3
    dataset.index = -1
    assert len(list(loader)) == 10


def test_the_message_holds_the_exit_report(OurLoader: Any) -> None:
    loader = OurLoader(Deadly(4, 1, by_signal=signal.SIGSEGV), num_workers=1)
    with pytest.raises(PoisonTaskError) as raised:
        list(loader)
    message = str(raised.value)
    assert "SIGSEGV" in message
    assert "__getitem__" in message, "faulthandler's traceback says where it happened"


@pytest.mark.parametrize("limit", [1, 2])
def test_the_poison_limit_is_an_option(OurLoader: Any, limit: int) -> None:
    options = LoaderOptions(poison_limit=limit)
    loader = OurLoader(Deadly(8, 2, by_exit=1), batch_size=None, num_workers=1, options=options)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(PoisonTaskError, match="2"):
        next(iterator)
    assert list(iterator) == [3, 4, 5, 6, 7]
    assert loader.stats().restarts == limit


@pytest.mark.parametrize("in_order", [True, False])
def test_one_deadly_sample_harms_no_other(OurLoader: Any, in_order: bool) -> None:
    loader = OurLoader(Deadly(60, 0, by_exit=1), batch_size=None, num_workers=3, in_order=in_order)
    iterator, seen, given_up = iter(loader), [], 0
    while True:
        try:
            seen.append(next(iterator))
        except StopIteration:
            break
        except PoisonTaskError:
            given_up += 1
    assert given_up == 1
    assert sorted(seen) == list(range(1, 60))


def test_a_stream_that_kills_is_given_up(OurLoader: Any) -> None:
    class DeadlyStream(Stream):
        def __iter__(self) -> Any:
            for number in super().__iter__():
                if number == 5:
                    kill(FORK.current_process().pid or 0)
                yield number

    iterator = iter(OurLoader(DeadlyStream(10), batch_size=None, num_workers=1))
    assert [next(iterator) for _ in range(5)] == list(range(5))
    with pytest.raises(WorkerError):
        next(iterator)


class Closing(Indices):
    """Item 3 closes the descriptors of its worker, which dies when it sends."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.closerange(3, 1 << 12)
        return index


def test_a_batch_whose_sending_kills_is_given_up(OurLoader: Any) -> None:
    iterator = iter(OurLoader(Closing(8), batch_size=2, num_workers=2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(PoisonTaskError, match="2, 3"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[4, 5], [6, 7]]


def exit_at_once(worker: int) -> None:
    os._exit(11)


@pytest.mark.parametrize(("limit", "deaths"), [(None, 5), (0, 1), (9, 10)])
def test_workers_that_end_before_they_load_anything(OurLoader: Any, limit: int | None, deaths: int) -> None:
    options = LoaderOptions(restart_limit=limit)
    loader = OurLoader(Indices(4), num_workers=2, worker_init_fn=exit_at_once, options=options)
    for _ in range(2):
        with pytest.raises(WorkerStartError, match=f"{deaths} workers ended(.*)code 11"):
            list(loader)


@pytest.mark.parametrize("method", ["spawn"])
def test_a_module_that_exits_when_a_worker_imports_it(
    OurLoader: Any, method: str, tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "exits_in_workers.py").write_text(
        "import multiprocessing, sys\n"
        "if multiprocessing.parent_process() is not None:\n"
        "    sys.exit('this module is not for workers')\n"
        "class Data:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return index\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import exits_in_workers  # type: ignore[import-not-found]

    loader = OurLoader(
        exits_in_workers.Data(),
        num_workers=1,
        multiprocessing_context=method,
        options=LoaderOptions(restart_limit=0),
    )
    with pytest.raises(WorkerStartError, match="this module is not for workers"):
        list(loader)
    assert "exits_in_workers" in sys.modules


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_hung_sample_times_out_and_the_loader_can_be_used_again(
    Loader: Any, num_workers: int, persistent_workers: bool
) -> None:
    gate = FORK.Event()
    loader = Loader(
        Gated(8, {3: gate}),
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        timeout=1,
    )
    iterator = iter(loader)
    assert list(itertools.islice(patiently(iterator), 3)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1 seconds"):
        next(iterator)
    gate.set()
    assert list(patiently(iter(loader))) == list(range(8))


def test_after_a_time_out_the_epoch_can_go_on(OurLoader: Any) -> None:
    gate = FORK.Event()
    iterator = iter(OurLoader(Gated(8, {3: gate}), batch_size=None, num_workers=2, timeout=1))
    seen = list(itertools.islice(patiently(iterator), 3))
    with pytest.raises(LoaderTimeoutError):
        next(iterator)
    gate.set()
    assert [*seen, *patiently(iterator)] == list(range(8))


def test_a_batch_that_hangs_is_given_up_after_its_time_limit(OurLoader: Any) -> None:
    loader = OurLoader(
        Hanging(24, holds=9),
        batch_size=4,
        num_workers=2,
        options=LoaderOptions(task_timeout_s=1.0),
    )
    iterator = iter(loader)
    seen = [int(key) for _ in range(2) for key in next(iterator)[1]]
    with pytest.raises(PoisonTaskError, match=r"9, 10.*3 workers.*was killed: .*task_timeout_s=1 s"):
        next(iterator)
    assert [*seen, *(int(key) for _, keys in iterator for key in keys)] == [*range(8), *range(12, 24)]


def hang(worker: int) -> None:
    signal.pause()


def test_workers_that_hang_before_they_load_anything(OurLoader: Any) -> None:
    options = LoaderOptions(task_timeout_s=0.3)
    with pytest.raises(WorkerStartError, match=r"was killed: .*at its start.*task_timeout_s=0\.3 s"):
        list(OurLoader(Indices(4), num_workers=1, worker_init_fn=hang, options=options))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers that are told to end have for it is not waited for."""
    monkeypatch.setitem(PrivateShard.close.__kwdefaults__, "grace_s", 0.2)


@pytest.mark.usefixtures("short_grace")
def test_leaving_while_a_worker_hangs_does_not_hang(OurLoader: Any) -> None:
    gate = FORK.Event()
    iterator = iter(OurLoader(Gated(8, {1: gate, 2: gate}), batch_size=None, num_workers=2))
    assert next(iterator) == 0
    pids = worker_pids()
    del iterator
    assert all(map(has_ended, pids))


@pytest.mark.usefixtures("short_grace")
def test_a_stopped_worker_times_out(OurLoader: Any) -> None:
    loader = OurLoader(Indices(400), batch_size=2, num_workers=1, timeout=1)
    iterator = iter(loader)
    next(patiently(iterator))
    (pid,) = worker_pids()
    kill(pid, signal.SIGSTOP)
    with pytest.raises(LoaderTimeoutError, match="timed out after 1 seconds"):
        for _ in iterator:
            pass
    assert len(list(patiently(iter(loader)))) == 200


def test_a_worker_that_is_stopped_and_continued(OurLoader: Any) -> None:
    iterator = iter(OurLoader(Indices(400), batch_size=2, num_workers=2))
    seen = next(iterator).tolist()
    (first, _second) = worker_pids()
    kill(first, signal.SIGSTOP)
    later = threading.Timer(0.3, kill, (first, signal.SIGCONT))
    later.start()
    seen += [int(index) for batch in iterator for index in batch]
    later.join()
    assert seen == list(range(400))


@pytest.mark.usefixtures("short_grace")
def test_a_stopped_worker_can_be_left(OurLoader: Any) -> None:
    iterator = iter(OurLoader(Indices(400), num_workers=2))
    next(iterator)
    pids = worker_pids()
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    del iterator
    assert all(map(has_ended, pids))


def test_the_user_interrupts_a_wait(OurLoader: Any) -> None:
    """Control-C arrives while the loop waits; the iterator and the loader remain usable."""
    gate = FORK.Event()
    loader = OurLoader(Gated(6, {2: gate}), batch_size=None, num_workers=2)
    iterator = iter(loader)
    seen = [next(iterator), next(iterator)]
    interruption = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    with pytest.raises(KeyboardInterrupt):  # it may come before there is anything to wait for
        interruption.start(), next(iterator)
    interruption.join()
    gate.set()
    assert [*seen, *iterator] == list(range(6))
    assert list(loader) == list(range(6))


def test_control_c_at_a_sample_is_not_the_samples_fault(OurLoader: Any, eventually: Any) -> None:
    """At a terminal and in a notebook, the signal also goes to the workers, which end; the iterator goes on."""
    begun, gate = FORK.Semaphore(0), FORK.Event()
    loader = OurLoader(Announced(6, {2: gate}, begun), batch_size=None, num_workers=1, multiprocessing_context="fork")
    iterator = iter(loader)
    seen = [next(iterator), next(iterator)]
    for _ in range(4):  # one more than a sample may take down
        begun.acquire()
        (worker,) = worker_pids()
        kill(worker, signal.SIGINT)
        eventually(functools.partial(has_ended, worker), what="the worker's end")
        interruption = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
        with pytest.raises(KeyboardInterrupt):
            interruption.start(), next(iterator)
        interruption.join()
    gate.set()
    assert [*seen, *iterator] == list(range(6))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_control_c_at_many_workers_is_not_a_series_of_deaths(OurLoader: Any, eventually: Any) -> None:
    begun, gate, workers = FORK.Semaphore(0), FORK.Event(), 10
    dataset = Announced(40, dict.fromkeys(range(1, 40), gate), begun)
    loader = OurLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork")
    iterator = iter(loader)
    seen = [next(iterator)]
    for _ in range(workers):
        begun.acquire()
    for pid in worker_pids():
        kill(pid, signal.SIGINT)
    eventually(lambda: not worker_pids(), what="the workers' end")
    gate.set()
    assert [*seen, *iterator] == list(range(40))
    assert loader.stats().restarts == workers


@pytest.mark.parametrize(("owner", "step"), [(WorkerIterator, "_handle"), (PrivateShard, "acknowledge")])
@pytest.mark.parametrize("in_order", [True, False])
def test_an_interruption_beside_a_wait_loses_nothing(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch, owner: type, step: str, in_order: bool
) -> None:
    """Control-C between the end of the wait and the note of what it was for, or just after that."""
    loader = OurLoader(Indices(60), batch_size=None, num_workers=2, in_order=in_order)
    iterator = iter(loader)
    seen = [next(iterator)]
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, interrupted)
            read_until_interrupted(iterator, seen)
        seen.append(next(iterator))
    assert sorted([*seen, *iterator]) == list(range(60))


@pytest.mark.parametrize(("owner", "step"), [(WorkerProcesses, "start"), (PrivateShard, "acknowledge")])
def test_an_interruption_while_a_worker_is_replaced_leaves_one_in_its_place(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    loader = OurLoader(Indices(12), batch_size=None, num_workers=1)
    iterator = iter(loader)
    seen = [next(iterator)]
    undisturbed = getattr(owner, step)

    def interrupted_by_death(part: Any, *arguments: object) -> Any:
        replaces = owner is WorkerProcesses or isinstance(part.poll(), Died)
        return (interrupted if replaces else undisturbed)(part, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted_by_death)
        (worker,) = worker_pids()
        kill(worker)
        read_until_interrupted(iterator, seen)
    assert [*seen, *iterator] == list(range(12))


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("in_order", [True, False])
def test_an_interruption_while_a_batch_is_submitted_loses_no_more_than_the_one_in_hand(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch, heard: bool, in_order: bool
) -> None:
    loader = OurLoader(Indices(30), batch_size=None, num_workers=2, in_order=in_order)
    iterator = iter(loader)
    seen = [next(iterator)]
    undisturbed = PrivateShard.submit

    def submit(*arguments: Any, **options: Any) -> None:
        if heard:
            undisturbed(*arguments, **options)
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(PrivateShard, "submit", submit)
            read_until_interrupted(iterator, seen)
        seen.append(next(iterator))
    seen += iterator
    assert len(seen) == len(set(seen)) >= 30 - 3  # none is in hand where more is planned because a worker is idle
    assert set(loader) == set(range(30))


def test_an_interruption_in_the_sampler_is_not_taken_for_its_end(OurLoader: Any) -> None:
    interruptions = iter([True])

    class Interrupted(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            for index in range(12):
                if index == 8 and next(interruptions, False):
                    raise KeyboardInterrupt
                yield index

    loader = OurLoader(Indices(12), batch_size=None, num_workers=1, sampler=Interrupted())
    iterator, seen = iter(loader), []
    read_until_interrupted(iterator, seen)
    with pytest.raises(WorkerError, match="the rest of the epoch is not known"):
        seen.extend(iterator)
    assert seen == list(range(8))
    assert list(loader) == list(range(12))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def read_until_interrupted(iterator: Any, seen: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        seen.extend(iterator)  # which appends one by one


def limited_descriptors(loader_class: Any) -> int:
    # What the test process has open comes on top of what one worker takes.
    limit = len(os.listdir("/proc/self/fd")) + 44
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    dataset = Samples([torch.full((20_000,), float(i)) for i in range(150)])
    kept = list(loader_class(dataset, batch_size=None, num_workers=1))
    assert [int(tensor[-1]) for tensor in kept] == list(range(150))
    return len(kept)


def test_keeping_many_batches_needs_no_descriptor_each(OurLoader: Any) -> None:
    assert in_fork(limited_descriptors, OurLoader) == 150


def test_a_workers_own_subprocess_does_not_hide_its_death(OurLoader: Any, eventually: Callable[..., None]) -> None:
    """The subprocess inherits the worker's descriptors and lives on."""

    class WithSubprocess(Indices):
        child: Any = None

        def __getitem__(self, index: int) -> tuple[int, int]:
            if self.child is None:
                self.child = subprocess.Popen(["sleep", "60"], close_fds=False)
            return index, self.child.pid

    iterator = iter(OurLoader(WithSubprocess(30), batch_size=None, num_workers=1))
    index, grandchild = next(iterator)
    (worker,) = worker_pids()
    kill(worker)
    rest = list(iterator)
    assert [index, *(number for number, _ in rest)] == list(range(30))
    for pid in {grandchild, *(pid for _, pid in rest)}:
        kill(pid)
    eventually(lambda: all(has_ended(pid) for _, pid in rest))
