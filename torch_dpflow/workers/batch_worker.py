"""Worker of a private loader: its main function, and collation of batches into shared memory.

A worker collates its batches into shared memory, without a copy. torch's `default_collate_fn_map` is its public
registry of collate functions. The function for tensors is replaced by a function that differs only in the memory of its
result. Torch's function handles other types, and tensors for which ours fails, so results and errors are torch's. A
dataset can get the memory of its batch and write rows there (`let_fill`), so no row is copied. The batches of a shared
flow are collated in the job, by `cluster/client/collate`.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from torch_dpflow._core.channels_last import collate_channels_last
from torch_dpflow._core.torch_private import (
    ExceptionWrapper,
    collate_tensor_fn,
    default_collate_fn_map,
    set_worker_signal_handlers,
)
from torch_dpflow.errors import NotPicklableError, WorkerError
from torch_dpflow.ipc.memory.arena import Arena, Block
from torch_dpflow.ipc.memory.segment import Memory, storage_over, tensor_over
from torch_dpflow.ipc.messages.fields import WorkerRefusedError
from torch_dpflow.ipc.messages.headers import FAILURE, OPENED, EpochBegin, WorkerBegun, encode
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES
from torch_dpflow.ipc.serialization.codec import encode as encode_payload
from torch_dpflow.ipc.serialization.fast_path import encode_sample
from torch_dpflow.ipc.transport import Connection, Frame, connect
from torch_dpflow.workers.batch_pieces import Lender, generation_of
from torch_dpflow.workers.batches import BatchSource, EpochSpec, LoadedBatch, LoadSpec, unpicklable_failure
from torch_dpflow.workers.exit_report import exit_report
from torch_dpflow.workers.process_control import use_sched_batch
from torch_dpflow.workers.stream_items import StreamItem
from torch_dpflow.workers.task_worker import Compress, TaskWorker

#: By collate function that keeps no rows: name of the dataset's method that receives `lend`, to allocate batches.
FILLS = {default_collate: "fill_batches", collate_channels_last: "fill_images"}

_arena: Arena | None = None
#: Addresses of blocks that were lent to datasets.
_filled: set[int] = set()
#: While `collate_at` runs: the tensors into which the next stacks are written, in order.
_places: list[torch.Tensor] = []


def collate_into(arena: Arena) -> None:
    """Make torch's default collate stack into blocks of `arena`, unless the user replaced its function for tensors."""
    global _arena
    if default_collate_fn_map.get(torch.Tensor) in (collate_tensor_fn, _collate_tensors):
        _arena = arena
        default_collate_fn_map[torch.Tensor] = _collate_tensors


def let_fill(dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
    """Let a dataset, or datasets inside it, write rows directly into shared batch memory. Call `collate_into` first.

    Their method that `FILLS` names for `collate_fn` is called with `lend`. Nothing happens without this method, or if
    other code might keep rows, which later batches would overwrite.
    """
    if collate_fn in FILLS:
        for one in _fillers(dataset, FILLS[collate_fn]) or ():
            getattr(one, FILLS[collate_fn])(lend)


def collate_at(samples: list[Any], places: list[torch.Tensor]) -> Any:
    """Collate with `default_collate`; the n-th stacked tensor is written into `places[n]`, until one does not fit.

    Raises the errors of `default_collate`.
    """
    _places[:] = places
    try:
        return default_collate(samples)
    finally:
        _places.clear()


def lend(nbytes: int) -> Memory | None:
    """Return `nbytes` of the arena's memory; None without an arena or free memory, or if `nbytes` is too small."""
    block = _lend(nbytes)
    if block is None:
        return None
    _filled.add(block.address)
    return block.memory


def _fillers(dataset: Any, method: str) -> list[Any] | None:
    """Return the parts of a dataset that can fill their batches; None if other code may use the rows."""
    if type(dataset) is Subset:
        return _fillers(dataset.dataset, method)
    if type(dataset) is TensorDataset:
        return []
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        found = [_fillers(one, method) for one in parts]
        return None if None in found else [one for own in found for one in own or ()]
    # Only this very class: a subclass may keep rows.
    return [dataset] if method in vars(type(dataset)) else None


def _collate_tensors(
    batch: tuple[torch.Tensor, ...] | list[torch.Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> Any:
    first = batch[0]
    if _is_dense(first) and set(map(type, batch)) == {torch.Tensor}:
        if _filled and (filled := _as_they_lie(batch)) is not None:
            return filled
        # In a worker torch's function stacks with `out=` as well. Unequal shapes, other dtypes and tensors that require
        # grad fail here as they do there, and then torch's function raises its own error.
        try:
            return torch.stack(batch, 0, out=_out_for(first, len(batch)))
        except RuntimeError:
            pass
    return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _out_for(first: torch.Tensor, count: int) -> torch.Tensor:
    shape = (count, *first.shape)
    if _places and first.dim():
        if _places[0].shape == shape and _places[0].dtype == first.dtype:
            return _places.pop(0)
        _places.clear()
    nbytes = first.numel() * first.itemsize * count
    block = _lend(nbytes)
    if block is None:
        # Not in torch's shared memory, whose file would be wasted: encoding copies small buffers anyway.
        return torch.empty(shape, dtype=first.dtype, device="cpu")
    return tensor_over(storage_over(block.memory), first.dtype, shape)


def _lend(nbytes: int) -> Block | None:
    block = _arena.allocate(nbytes) if _arena is not None and nbytes >= LARGE_BYTES else None
    if block is not None:
        _filled.discard(block.address)  # its former batch has failed
    return block


def _as_they_lie(batch: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> torch.Tensor | None:
    """Return the batch without a copy if its rows fill a lent block in order; None otherwise."""
    first, start = batch[0], batch[0].data_ptr()
    if start not in _filled or _arena is None:
        return None
    _filled.discard(start)
    form = first.dtype, first.shape, first.stride()
    for number, row in enumerate(batch):
        is_next = row.data_ptr() == start + number * first.nbytes
        if not is_next or (row.dtype, row.shape, row.stride()) != form:
            return None
    block = _arena.block_at(start, len(batch) * first.nbytes)
    if block is None or not first.is_contiguous():
        return None
    return tensor_over(storage_over(block.memory), first.dtype, (len(batch), *first.shape))


def _has_script() -> bool:
    """Return whether `__main__` is a file or module, which multiprocessing then imports in a process that it starts."""
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) is not None or getattr(main.__spec__, "name", None) is not None


class _WithoutScript(ForkingPickler):
    """Pickler that refuses classes and functions of `__main__`, which another process cannot import."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{obj.__qualname__} is defined in a notebook or an interactive session, which no process can import"
            )
        return NotImplemented


class DeferredPickle:
    """Wrapper of an argument of a new process, which unpickles `value` only in `open`, so that errors can be caught.

    Without it, multiprocessing unpickles arguments before any code of ours runs, and an import that fails ends the
    process with an uncaught traceback. A forked process gets the object itself.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._pickled: bytes | None = None

    def open(self) -> Any:
        """Unpickle and return the value. Raises any error of unpickling it."""
        if self._pickled is not None:
            self._value, self._pickled = pickle.loads(self._pickled), None
        return self._value

    def __getstate__(self) -> bytes:
        # ForkingPickler, while a process is being started: locks and file descriptors can be pickled only then.
        pickler = ForkingPickler if _has_script() else _WithoutScript
        return bytes(pickler.dumps(self._value))

    def __setstate__(self, pickled: bytes) -> None:
        self._value, self._pickled = None, pickled


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The identity of a worker process, and the address of its shard."""

    worker: int
    #: Counts the processes that have had this number.
    incarnation: int
    address: str
    #: Directory that is private to the training process and its workers.
    directory: str


def exit_report_path(spec: WorkerSpec) -> str:
    """Return the path of this worker's exit report: faulthandler's stacks, or a traceback."""
    return os.path.join(spec.directory, f"exit-report-{spec.worker}-{spec.incarnation}")


def control_c(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for SIGINT. The exit report names this function, unlike for a sample that raises it."""
    raise KeyboardInterrupt


def main(load_spec: DeferredPickle, spec: WorkerSpec) -> None:
    """Load batches until the shard sends `Stop` or the shard's process ends. The target of a worker process.

    Args:
        load_spec: holds a `LoadSpec`.
    """
    # In this order: faulthandler's handlers call those that they replace, which then are torch's. And a handler that
    # was inherited would not be installed again.
    faulthandler.disable()
    set_worker_signal_handlers()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, control_c)
    with suppress(KeyboardInterrupt), exit_report(exit_report_path(spec)):  # the owner gets it too, and decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the platform may have blocked it
        opened = load_spec.open()
        connection = connect(spec.address, identity=f"{spec.worker}/{spec.incarnation}".encode())
        BatchWorker(opened, spec.worker, spec.incarnation, connection).work()


class BatchWorker(TaskWorker):
    """Worker of a private loader.

    Args:
        connection, compress: as in `TaskWorker`. `work` closes the connection at its end.
    """

    def __init__(
        self,
        load_spec: LoadSpec,
        number: int,
        incarnation: int,
        connection: Connection,
        *,
        compress: Compress | None = None,
    ) -> None:
        super().__init__(connection, number, incarnation, load_spec.shared_memory or 0, compress)
        self._load_spec = load_spec
        self._source: BatchSource | None = None
        #: Generation of the present epoch.
        self._generation = -1
        #: Whether no batch has been loaded yet.
        self._is_first = True

    def work(self) -> None:
        """Load until the shard sends `Stop`. Raises WorkerRefusedError if the shard refuses this worker."""
        super().work()
        self._connection.close()

    def begin(self) -> None:
        """Send the handshake, and set this process up as a DataLoader worker."""
        self._send_handshake(is_ready=self._load_spec.starts_alone)
        # After the handshake: the answer arrives while torch is set up.
        self._source = BatchSource(self._load_spec, self._number, self._clock)

    def _handle(self, header: Any, frames: list[memoryview]) -> None:
        if isinstance(header, EpochBegin):
            held = len(self._tasks)
            self._tasks.clear()
            self._begin_epoch(frames[0])
            self._report_if_emptied(held)
        super()._handle(header, frames)

    def _on_welcome(self, frame: memoryview, *, shares_memory: bool) -> None:
        if not shares_memory:
            self._arena = None
        elif self._arena is not None:
            collate_into(self._arena)
        self._begin_epoch(frame)
        if shares_memory and self._arena is not None and self._source is not None:
            self._source.share(self._arena, Lender(self._number, self._incarnation, os.getpid()), collate_at)
        # After `worker_init_fn`, which may have wrapped the dataset.
        let_fill(self._load_spec.dataset, self._load_spec.collate_fn)
        if not self._load_spec.starts_alone:
            self._send_ready()

    def _on_refused(self, reason: str) -> None:
        raise WorkerRefusedError(f"the shard refuses this worker: {reason}")

    def _begin_epoch(self, order: memoryview) -> None:
        assert self._source is not None
        epoch: EpochSpec = pickle.loads(order)
        self._generation = epoch.generation
        begun = self._source.begin(epoch)
        if begun is None:
            return
        try:
            pickled = pickle.dumps(begun)
        except Exception:  # the exception's class cannot be pickled; its text can
            pickled = pickle.dumps(replace(begun, failure=_as_runtime_error(begun.failure)))
        self._connection.send([encode(WorkerBegun()), pickled])

    def _load(self, task: int, payload: memoryview) -> None:
        assert self._source is not None
        if generation_of(task) != self._generation:
            # Not loaded: it would get the random numbers of another epoch.
            raise WorkerError(
                f"a batch of epoch {generation_of(task)} of this loader arrived in its epoch {self._generation}: a "
                "message of the shard was lost"
            )
        self._running.note(task)
        index = pickle.loads(payload)
        loaded = self._source.load(task, index)
        loaded_at = time.perf_counter()
        table, frames = self._wrap(loaded, index)
        if loaded.stream is not None:
            frames = [*frames, pickle.dumps(loaded.stream)]
        started = self._tasks[0][0] if self._tasks else None
        wrapped_at = time.perf_counter()
        self._clock.hand_over(wrapped_at - loaded_at)
        # The running task still: its effects on this process, as closed descriptors, may show only now.
        hold = self._load_spec.holds and self._may_hold()
        self._outbox.add(task, loaded.kind, table, frames, started, hold=hold, has_stream=loaded.stream is not None)
        self._clock.hand_over(time.perf_counter() - wrapped_at)  # sent with the next result
        if self._is_first:
            self._is_first = False
            # Not before: the job waits for the first batch, and the socket's thread has to answer quickly.
            use_sched_batch()

    def _wrap(self, loaded: LoadedBatch, index: Any) -> tuple[Any, list[Frame]]:
        if loaded.kind == OPENED:
            encoded: tuple[Any, list[Frame]] = loaded.value
            return encoded
        try:
            name = "result" if isinstance(index, StreamItem) else "batch"
            return encode_sample(loaded.value, arena=self._arena, keep_layout=True, name=name)
        except NotPicklableError as error:
            if loaded.kind == FAILURE:
                # The exception's class cannot be pickled; its text can.
                return encode_payload(_as_runtime_error(loaded.value))
            return encode_payload(unpicklable_failure(self._number, error, index))


def _as_runtime_error(failure: ExceptionWrapper) -> ExceptionWrapper:
    plain = ExceptionWrapper((RuntimeError, RuntimeError(), None), failure.where)
    plain.exc_msg = failure.exc_msg
    return plain
