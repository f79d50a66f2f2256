"""Worker processes of one loader: their load spec, start, replacement and end."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate

from torch_dpflow._core import descriptors
from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow._core.torch_private import DatasetKind, sharding_worker_init_fn
from torch_dpflow.epoch.own_state import has_state
from torch_dpflow.errors import NotPicklableError, PoisonTaskError, WorkerStartError
from torch_dpflow.ipc.memory.headroom import machine_total
from torch_dpflow.ipc.transport import Listener, listen
from torch_dpflow.loader.first_state import FirstState
from torch_dpflow.log import LOADER
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers import batch_worker
from torch_dpflow.workers.batch_worker import DeferredPickle, WorkerSpec, exit_report_path
from torch_dpflow.workers.batches import SHARED_FRACTION, LoadSpec
from torch_dpflow.workers.fork_server import local_platform
from torch_dpflow.workers.platform import FALSE_STARTS, Handle, Platform, ProcessSpec
from torch_dpflow.workers.script_settings import ScriptSettings
from torch_dpflow.workers.stream_items import MappedItems, StreamItem

#: The time between SIGTERM and SIGKILL for a worker that did not stop by itself, seconds.
TERMINATE_S = 1.0
#: File descriptors that this process needs: for each worker (two pipes, its process, its connection), and once (a
#: directory's lock, sockets, mappings, and those that a forked worker adds to the inherited ones).
WORKER_DESCRIPTORS, OWN_DESCRIPTORS = 4, descriptors.SPARE + 16
#: Modules that workers import at their start. A fork server imports them once, so its processes start as fast as forks.
PRELOAD = (batch_worker.__name__, "torch_dpflow.ipc.transport.zeromq", "numpy.random")
#: The default of `restart_limit` after the first batch: number of worker deaths in a row that are tolerated.
RESTART_LIMIT = 8


def load_spec(iterator: Any, loader: Any, options: LoaderOptions, *, own_stream: bool) -> LoadSpec:
    """Return the load spec that all workers receive. iterator: an instance of a subclass of torch's iterator."""
    worker_init_fn = loader.worker_init_fn
    if isinstance(iterator._dataset, IterDataPipe | MapDataPipe):
        worker_init_fn = functools.partial(
            sharding_worker_init_fn, worker_init_fn, iterator._world_size, iterator._rank
        )
    shared_memory = options.shared_memory
    if shared_memory is None and loader.platform is None:
        shared_memory = machine_total() // SHARED_FRACTION // iterator._num_workers
    return LoadSpec(
        dataset=iterator._dataset,
        dataset_kind=iterator._dataset_kind,
        auto_collation=iterator._auto_collation,
        collate_fn=iterator._collate_fn,
        drop_last=iterator._drop_last,
        batch_size=loader.batch_size,
        worker_init_fn=worker_init_fn,
        num_workers=int(iterator._num_workers),
        base_seed=int(iterator._base_seed),
        own_stream=own_stream,
        by_sample=options.seeding == "sample" and not own_stream,
        divides=not own_stream and divides_batches(iterator, loader, options),
        read_threads=options.read_threads,
        shared_memory=shared_memory,
        holds=isinstance(iterator._dataset, MappedItems),
        settings=None if loader.platform is None else ScriptSettings.capture(),
    )


def has_own_streams(loader: Any, options: LoaderOptions) -> bool:
    """Return whether batches are bound to workers, because each worker has its own samples, state or random stream."""
    if loader._dataset_kind == DatasetKind.Iterable or options.seeding == "worker":
        return True
    if has_state(loader.dataset):  # its state depends on what the worker loaded before
        return True
    return options.seeding == "auto" and loader.worker_init_fn is not None


def divides_batches(iterator: Any, loader: Any, options: LoaderOptions) -> bool:
    """Return whether several workers may load parts of one batch, if batches are not bound to workers.

    There must be several workers on this host, one read thread each, and torch's own collate, which treats each sample
    independently. A dataset with `__getitems__` gets whole batches; the worker checks that.
    """
    is_local = loader.platform is None and iterator._num_workers > 1
    is_collated = iterator._auto_collation and iterator._collate_fn is default_collate
    return is_local and is_collated and options.read_threads == 1


def local_workers(loader: Any, spec: LoadSpec, workers: int) -> WorkerProcesses:
    """Return the loader's workers on this host, not started yet. They use the loader's multiprocessing context."""
    platform = local_platform(loader.multiprocessing_context or torch.multiprocessing, preload=PRELOAD)
    return WorkerProcesses(platform, spec, workers)


class WorkerProcesses:
    """Workers of a loader on this host: the latest process of each worker number.

    The training thread starts and releases processes; the shard's thread may call `ended`, `refusal`, `is_interrupted`
    and `kill`.

    Args:
        platform: runs the processes; `close` closes it.
        spec: the load spec of all workers.

    Raises DescriptorLimitError: the limit of open files is too low for this many workers.
    """

    def __init__(self, platform: Platform, spec: LoadSpec, workers: int) -> None:
        descriptors.require(workers * WORKER_DESCRIPTORS + OWN_DESCRIPTORS, f"a loader with {workers} workers")
        self._platform = platform
        self._load_spec = DeferredPickle(spec)
        #: Replacements copy the dataset as the first workers did, or an epoch would mix two states of it.
        self._first_state = FirstState(spec.dataset)
        #: Directory of the listener's socket and the workers' exit reports.
        self.directory = PrivateDirectory()
        self.listener = listen(f"ipc://{self.directory.path}/shard")
        self.listener.watch(platform.wakeup_fd)
        #: Worker numbers by the names under which workers are launched.
        self._numbers = {f"worker-{worker}": worker for worker in range(workers)}
        self._handles: dict[int, Handle] = {}
        self._incarnations = [0] * workers

    def __len__(self) -> int:
        return len(self._incarnations)

    @property
    def local(self) -> WorkerProcesses:
        """This object, because all of its workers are on this host."""
        return self  # no attribute, which would be a reference cycle

    @property
    def sender(self) -> Listener:
        """The object that sends the shard's messages."""
        return self.listener

    @property
    def handles(self) -> list[Handle]:
        return [handle for _, handle in sorted(self._handles.items())]

    def start_all(self) -> None:
        for worker in range(len(self)):
            self.start(worker)

    def start(self, worker: int) -> None:
        """Start a process for this worker.

        Raises:
            NotPicklableError: the load spec cannot be sent to the process.
            LaunchError, DescriptorLimitError: see `Platform.launch`.
        """
        spec = self._spec(worker)
        process = ProcessSpec(
            name=f"worker-{worker}",
            incarnation=spec.incarnation,
            target=batch_worker.main,
            arguments=(self._load_spec, spec),
            report_file=exit_report_path(spec),
            directory=self.directory.path,
        )
        try:
            self._handles[worker] = self._platform.launch(process)
        except NotPicklableError as error:
            raise NotPicklableError(
                f"the dataset, collate_fn or worker_init_fn cannot be sent: {error}. Define it at the top of a module "
                "(no lambda, no local class), leave out open files and locks, or pass multiprocessing_context='fork'"
            ) from error

    def _spec(self, worker: int) -> WorkerSpec:
        return WorkerSpec(
            worker=worker,
            incarnation=self._incarnations[worker],
            address=self.listener.address,
            directory=self.directory.path,
        )

    def replace(self, worker: int, dead: Handle) -> str:
        """Start another process in place of `dead`, unless it was replaced before; return how `dead` ended.

        Raises the errors of `start`. After a DescriptorLimitError the call can be repeated.
        """
        end = "has ended"
        handle = self._handles.get(worker)
        if handle is None or handle is dead:
            end = self.reap(worker)
            self._incarnations[worker] += 1
            descriptors.require(WORKER_DESCRIPTORS + OWN_DESCRIPTORS, f"another process for worker {worker}")
            with self._first_state.restored():
                self.start(worker)
        return end

    def reap(self, worker: int) -> str:
        """Release the process of a worker that died; return how it ended."""
        handle = self._handles.get(worker)
        if handle is None:  # an earlier call was interrupted
            return "has ended"
        end = handle.describe()
        del self._handles[worker]
        return str(end)

    def ended(self) -> list[tuple[int, Handle]]:
        """Return (worker, process) of each process that has ended since the last call, including replaced processes."""
        return [(self._numbers[handle.name], handle) for handle in self._platform.take_ended()]

    def refusal(self, worker: int, incarnation: int) -> str:
        """Return a text on why this incarnation is not the latest process of its worker; empty if it is."""
        if worker >= len(self):
            return f"there are {len(self)} workers"
        latest = self._incarnations[worker]
        return "" if incarnation == latest else f"its present incarnation is {latest}"

    def is_interrupted(self, worker: int) -> bool:
        """Return whether Control-C has ended the worker's process. Call it before `reap`, which removes the report."""
        with suppress(OSError), open(exit_report_path(self._spec(worker)), errors="replace") as report:
            return f", in {batch_worker.control_c.__name__}\n" in report.read()
        return False

    def kill(self, worker: int, why: str) -> None:
        """Kill a worker's process; the reason is logged with its replacement."""
        handle = self._handles.get(worker)
        if handle is not None:
            handle.kill(why)

    def close(self) -> None:
        self._platform.close(grace_s=TERMINATE_S)
        for handle in [*self._handles.values()]:  # another thread may close as well
            handle.describe()  # reaps those not returned by `ended`
        self._handles.clear()
        self.directory.remove()


_UNGUARDED = (
    "With multiprocessing_context='spawn' or 'forkserver', a worker runs the script again, except what is under "
    '`if __name__ == "__main__":`; the loop belongs there. '
)


class Restarts:
    """Replacement of one iterator's workers that died, until too many die in a row.

    Args:
        limit: number of tolerated deaths in a row, without a batch in between; None: the default in `LoaderOptions`.
        workers: number of workers.
        meter: counts the replacements.
    """

    def __init__(self, limit: int | None, workers: int, meter: LoaderMeter) -> None:
        self._limit = limit
        self._workers = workers
        self._meter = meter
        #: Number of batches that have arrived, or during which too many workers died; counted by the iterator.
        self.results = 0
        #: Deaths since the latest result, and the number of results at the latest death.
        self._deaths = self._results_before = 0
        #: How many of these deaths the same cause may have.
        self._at_once = 1
        self._exit_report = ""
        #: By worker number, how the worker's previous process ended.
        self.ends: dict[int, str] = {}

    def replace(self, processes: WorkerProcesses, worker: int, dead: Handle) -> None:
        """Start another process in place of `dead`.

        Raises:
            WorkerStartError: too many have died in a row.
            The errors of `WorkerProcesses.replace`.
        """
        if self._are_too_many(is_interrupted=processes.is_interrupted(worker)):
            raise self._too_many(worker, processes.reap(worker))
        self._note_replaced(worker, processes.replace(worker, dead))

    def note_lost(self, worker: int, how: str) -> None:
        """Record the end of a remote worker, which is replaced. how: the cause; empty if it was requested: not counted.

        Raises WorkerStartError: too many have died in a row.
        """
        if not how:
            return
        if self._are_too_many():
            raise self._too_many(worker, how)
        self._note_replaced(worker, how)

    def _are_too_many(self, *, is_interrupted: bool = False) -> bool:
        """Count a death; return whether it is one too many."""
        if self.results != self._results_before:
            self._deaths, self._at_once = 0, 1
        self._results_before = self.results
        self._deaths += 1
        if is_interrupted:  # Control-C ends all workers at once
            self._at_once = self._workers
        default = RESTART_LIMIT if self.results else min(RESTART_LIMIT, self._workers + FALSE_STARTS)
        return self._deaths > self._at_once * (default if self._limit is None else self._limit)

    def _too_many(self, worker: int, how: str) -> WorkerStartError:
        self._exit_report = how
        hint = _UNGUARDED if how.endswith("exited with code 1") and not self.results else ""
        return WorkerStartError(
            f"{self._deaths} workers ended one after the other and no batch came in between; the last one, "
            f"worker {worker}, {how}\n{hint}Run with num_workers=0 to see where it happens. Raise "
            "LoaderOptions(restart_limit=...) if they are killed from outside"
        )

    def _note_replaced(self, worker: int, how: str) -> None:
        self._exit_report = self.ends[worker] = how
        self._meter.restarts += 1
        LOADER.warning("worker %d is replaced: %s", worker, how)

    def poison_error(self, index: Any, deaths: int) -> PoisonTaskError:
        """Return the error for a batch during which `deaths` workers died."""
        what = described(index) if isinstance(index, StreamItem) else f"the batch of {described(index)}"
        return PoisonTaskError(
            f"{what} took down {deaths} workers one after the other and is skipped; the last one, "
            f"{self._exit_report}\nLoad it with num_workers=0 to see why; what comes after it can be loaded"
        )


def described(index: Any) -> str:
    """Return a text on the batch or item with this index, for messages."""
    if index is None or (isinstance(index, list) and all(i is None for i in index)):
        return "the next samples of the stream"
    text = repr(index)
    if isinstance(index, StreamItem):
        return text
    return f"index {text}" if len(text) <= 400 else f"indices {text[:400]}… ({len(index)} of them)"
