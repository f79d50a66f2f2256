"""Collation of a shared flow's batches in the training process, and their delivery to the training loop.

torch's default collate stacks large tensors with all threads of the process, which the training loop needs itself. This
module uses one thread. Tensors of 32 KiB or more that are adjacent in memory, such as those of one answer of a shard,
are not copied: the batch is the memory in which they were received.

The thread of an `EpochReader` fetches and collates. `PlanFeed` passes it the keys of batches, and `ReadyBatches` passes
the batches back in order. A sampler whose order may still change is called as torch calls it: in the training loop's
thread, and no further ahead. `EpochReader.head` returns the same batch until the training loop has taken it, by the
single assignment `ready.outcome = TAKEN`. So Control-C loses no batch; see `PlannedBatch`.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from torch_dpflow._core.channels_last import collate_channels_last, has_channels_last
from torch_dpflow._core.threads import StopSignal
from torch_dpflow._core.torch_private import ExceptionWrapper, collate, collate_tensor_fn, default_collate_fn_map
from torch_dpflow.cluster.messages.shard import POISONED, WORKERLESS
from torch_dpflow.errors import LoaderTimeoutError, MessageError, PoisonTaskError, WorkerError, WorkerStartError
from torch_dpflow.ipc.memory.segment import keeps_memory, memory_of, storage_over, tensor_over
from torch_dpflow.ipc.messages.headers import Frame, PayloadTable
from torch_dpflow.ipc.serialization.codec import decode, decode_heads
from torch_dpflow.ipc.serialization.fast_path import numbers_beside
from torch_dpflow.ipc.serialization.pickling import is_plain

#: Below this size torch stacks with one thread as well (bytes).
_SMALL_BYTES = 1 << 15


def collate_function(collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
    """Return `collate_fn`, or `collate_samples` in place of None or torch's default, with the same results."""
    return collate_samples if collate_fn is None or collate_fn is default_collate else collate_fn


def collate_samples(samples: list[Any]) -> Any:
    """Collate as torch's `default_collate`, with the same results and errors.

    The caller must not use the samples afterwards, because the batch may take over their memory.
    """
    mapping: dict[Any, Callable[..., Any]] = {**default_collate_fn_map}
    if mapping.get(torch.Tensor) is collate_tensor_fn:
        mapping[torch.Tensor] = partial(_stack, used=set())
    return collate(samples, collate_fn_map=_kept_results(mapping))


def collate_payloads(
    payloads: Sequence[tuple[PayloadTable, Sequence[Frame]]], *, keep_layout: bool = False
) -> Any | None:
    """Collate the samples in these payloads without unpickling each sample; return None if that is not possible.

    It is possible only if each sample is a tensor, or a tuple of a tensor and numbers, and all tensors have the same
    dtype and shape. The result equals that of `collate_samples`; with `keep_layout`, that of `collate_channels_last`.
    The batch may take over the memory of the frames.
    """
    found = decode_heads(payloads)
    if not found or default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return None
    head, buffer = found[0]
    sample: Any = pickle.loads(head, buffers=[buffer])
    alone = type(sample) is torch.Tensor
    first = sample[0] if type(sample) is tuple and sample else sample
    if type(first) is not torch.Tensor or first.nbytes != buffer.nbytes:
        return None
    if not (first.is_contiguous() or (keep_layout and has_channels_last(first))):
        return None
    numbers = numbers_beside([head for head, _ in found], first, alone=alone)
    if numbers is None or len(set(map(len, numbers))) > 1:
        return None
    if any(buffer.nbytes != first.nbytes for _, buffer in found):
        return None
    tensors = _joined([buffer for _, buffer in found], first)
    if alone:
        return tensors
    mapping = _kept_results(default_collate_fn_map)
    columns = [collate(column, collate_fn_map=mapping) for column in zip(*numbers)]
    return [tensors, *columns]


def _joined(buffers: list[memoryview], first: torch.Tensor) -> torch.Tensor:
    """Stack the tensors in `buffers`, each like `first`, in the layout of `first`."""
    begin, nbytes = first.data_ptr(), first.nbytes
    if nbytes < _SMALL_BYTES:
        memory = torch.empty(len(buffers) * nbytes, dtype=torch.uint8, device="cpu").numpy()
        memory.data[:] = b"".join(buffers)
    elif all(_address(buffer) == begin + place * nbytes for place, buffer in enumerate(buffers)):
        memory = np.asarray(_Row(begin, len(buffers) * nbytes, buffers))
    else:
        memory = torch.empty(len(buffers) * nbytes, dtype=torch.uint8, device="cpu").numpy()
        for row, buffer in zip(memory.reshape(len(buffers), nbytes), buffers):
            np.copyto(row, np.frombuffer(buffer, np.uint8))
    stride = (first.numel(), *first.stride())
    return tensor_over(storage_over(memory), first.dtype, (len(buffers), *first.shape), stride)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _stack(
    batch: list[torch.Tensor], *, used: set[int], collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> Any:
    """Stack tensors, without a copy if possible. used: addresses of memory that has become a batch before."""
    first = batch[0]
    if first.nbytes < _SMALL_BYTES or not all(_is_alike(one, first) for one in batch):
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    if _are_in_a_row(batch) and first.data_ptr() not in used:
        # Once: if a sample holds the same tensor twice, torch makes two batches, which must not share memory.
        used.add(first.data_ptr())
        memory = np.asarray(_Row(first.data_ptr(), len(batch) * first.nbytes, batch))
        return tensor_over(storage_over(memory), first.dtype, (len(batch), *first.shape))
    out = torch.empty((len(batch), *first.shape), dtype=first.dtype)
    rows = _bytes_of(out).reshape(len(batch), first.nbytes)
    for row, one in zip(rows, batch):
        np.copyto(row, _bytes_of(one))
    return out


def _kept_results(mapping: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the functions of `mapping`, each wrapped by `_kept`."""
    return {kind: partial(_kept, function) for kind, function in mapping.items()}


def _kept(function: Callable[..., Any], batch: Any, **keywords: Any) -> Any:
    """Call `function`; return its result over a storage that stays alive for arrays after `share_memory_`."""
    result = function(batch, **keywords)
    if type(result) is not torch.Tensor or not is_plain(result):
        return result
    storage = result.untyped_storage()
    if not storage.nbytes() or keeps_memory(storage):
        return result
    over = storage_over(memory_of(storage))
    return tensor_over(over, result.dtype, result.shape, result.stride(), int(result.storage_offset()))


class _Row:
    """Adjacent pieces of memory, which numpy takes as one array. It keeps the pieces alive."""

    def __init__(self, address: int, nbytes: int, pieces: Sequence[Any]) -> None:
        self._pieces = pieces
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


def _are_in_a_row(batch: list[torch.Tensor]) -> bool:
    """Return whether there are several tensors and each begins where the one before ends."""
    begin, nbytes = batch[0].data_ptr(), batch[0].nbytes
    return len(batch) > 1 and all(one.data_ptr() == begin + place * nbytes for place, one in enumerate(batch))


def _is_alike(one: torch.Tensor, first: torch.Tensor) -> bool:
    return (
        type(one) is torch.Tensor
        and one.layout is torch.strided
        and one.is_cpu
        and one.dtype == first.dtype
        and one.shape == first.shape
        and one.is_contiguous()
        and not (one.requires_grad or one.is_quantized or one.is_conj() or one.is_neg())
    )


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


#: A payload and its frames, or an error in its place.
Received: TypeAlias = tuple[PayloadTable, Sequence[Frame]] | WorkerError


def build_batch(
    ready: ReadyBatch,
    came: list[Received | None],
    collate: Callable[[list[Any]], Any],
    how_workers_ended: Callable[[], str] = str,
) -> None:
    """Set `ready.outcome` to the collated batch, or `ready.error` to the first error, of a sample or of `collate`.

    came: the received samples, in the order of `ready.keys`; None for samples that were not fetched after an error.
    how_workers_ended: returns a text on recent worker deaths, for error messages; empty if none is known.
    """
    keeps_layout = collate is collate_channels_last
    if keeps_layout or collate is collate_samples:
        ready.outcome = _made_at_once(came, keeps_layout)
        if ready.outcome is not None:
            return
    values = [_opened(one) if isinstance(one, tuple) else one for one in came]
    broken = next(
        ((key, value) for key, value in zip(ready.keys, values) if isinstance(value, ExceptionWrapper | WorkerError)),
        None,
    )
    if broken is not None:
        ready.error = _error_of(*broken, how_workers_ended)
        return
    try:
        ready.outcome = collate(values)
    except Exception:
        ready.error = ExceptionWrapper(where="while putting a batch together")


def received_sample(kind: int, table: PayloadTable, frames: Sequence[Frame]) -> Received:
    """Return the payload of a sample, or its error if `kind`, the sample's outcome, is POISONED or WORKERLESS."""
    if kind == POISONED:
        return PoisonTaskError(bytes(frames[0]).decode(errors="replace"))
    if kind == WORKERLESS:
        return WorkerStartError(bytes(frames[0]).decode(errors="replace"))
    return table, frames


def _made_at_once(came: list[Received | None], keep_layout: bool) -> Any | None:
    payloads = [one for one in came if isinstance(one, tuple)]
    if len(payloads) < len(came):
        return None
    try:
        return collate_payloads(payloads, keep_layout=keep_layout)
    except Exception:  # opened one by one, the sample raises it again, with its name
        return None


def _opened(came: tuple[PayloadTable, Sequence[Frame]]) -> Any:
    try:
        return decode(*came)
    except MessageError:
        # The payload itself is valid, as a worker made it: a class of the sample cannot be unpickled here.
        return ExceptionWrapper(where="while opening a sample")


def _error_of(key: int, value: Any, how_workers_ended: Callable[[], str]) -> BaseException | ExceptionWrapper:
    if isinstance(value, WorkerError):
        is_poisoned = isinstance(value, PoisonTaskError)
        what = f"sample {key}: {value}" if is_poisoned else f"no worker for sample {key}: {value}"
        todo = "; leave it out of the job's samples, or repair it" if is_poisoned else ""
        how = how_workers_ended()
        ends = f". The workers that ended last: {how}" if how else ""
        return type(value)(f"{what}{todo}{ends}")
    wrapper: ExceptionWrapper = value
    return wrapper


#: Value that iterating over a `PlanFeed` returns while the next batch has not been put.
LATER: Any = object()


class PlanFeed:
    """Queue of batches between two threads: one calls `put`, the other iterates. A batch is a list of keys.

    No batch is lost, repeated or moved if Control-C interrupts `put` and the caller puts the batch again.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        self._taken = 0
        self._ended = False
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, number: int, keys: list[Any]) -> None:
        """Append the batch with this number, counted from 0. A repeated number is ignored."""
        self._waiting.append((number, keys))
        self._came.put(None)

    def end(self) -> None:
        """Record that no more batches follow."""
        self._ended = True
        self._came.put(None)

    def wait(self, within_s: float) -> None:
        """Wait until `put` or `end` is called, at most `within_s` seconds. Can return earlier."""
        with suppress(queue.Empty):
            self._came.get(timeout=within_s)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the next batch; `LATER` if it has not been put yet."""
        is_last = self._ended  # read first: nothing is put after the end
        while self._waiting:
            number, keys = self._waiting.popleft()
            if number == self._taken:
                self._taken += 1
                return keys
        if is_last:
            raise StopIteration
        later: list[Any] = LATER
        return later


#: Longest single wait of the training loop, and of the reader's thread (seconds); a longer wait is repeated.
LOOK_S, IDLE_S = 1.0, 0.1


@dataclass(slots=True, eq=False)
class ReadyBatch:
    """Batch of a flow that is ready to be delivered, or the error to raise instead."""

    #: Counts the batches, starting at 0.
    number: int
    outcome: Any
    keys: list[int]
    #: Number of samples that the reader has delivered once this batch is delivered.
    end: int
    error: BaseException | ExceptionWrapper | None = None
    nbytes: int = 0
    #: Whether this marks the end of the epoch and is no batch; with `error`, the epoch ended early.
    is_last: bool = False


class ReadyBatches:
    """Queue of ready batches: one thread puts and one takes.

    Args:
        capacity: maximum number of waiting batches, not counting the batch that `next` returns.
        closed: signal that ends the epoch early; call `wake` after setting it.
    """

    def __init__(self, capacity: int, closed: StopSignal) -> None:
        self._capacity = capacity
        self._closed = closed
        self._waiting: deque[ReadyBatch] = deque()
        # These only wake the other side. Two of them take an eighth of the time of one bounded `queue.Queue`.
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._went: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: The batch that `next` returns until `done` is called; None after that.
        self.in_hand: ReadyBatch | None = None

    def put(self, ready: ReadyBatch, idle: Callable[[], None]) -> None:
        """Wait until the queue is not full, then append a batch. Once closed, return at once without appending it.

        idle: called every `IDLE_S` seconds of the wait.
        """
        if self._went.qsize():
            self._went.get()
        while len(self._waiting) >= self._capacity and not self._closed.is_set():
            try:
                self._went.get(timeout=IDLE_S)
            except queue.Empty:
                idle()
        if not self._closed.is_set():
            self._waiting.append(ready)
            self._came.put(None)

    def next(self, timeout_s: float | None = None) -> ReadyBatch | None:
        """Wait for the next batch, and return the same batch until `done` is called; return None if closed meanwhile.

        Raises LoaderTimeoutError if no batch is put within `timeout_s` seconds; None: no limit.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.in_hand is None:
            if self._closed.is_set():
                return None
            waiting = self._waiting
            if waiting:
                self.in_hand = waiting[0]
            else:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise LoaderTimeoutError(
                        f"DataLoader timed out after {timeout_s:g} seconds; the batch is still being loaded, and the "
                        "iterator's next call returns it"
                    )
                # A signal that another thread has received is handled only when this one returns to Python.
                with suppress(queue.Empty):
                    self._came.get(timeout=min(LOOK_S, left_s))
        waiting = self._waiting
        if waiting and waiting[0] is self.in_hand:
            waiting.popleft()
            self._went.put(None)
            if self._came.qsize():
                self._came.get()
        return self.in_hand

    def done(self) -> None:
        """Proceed to the next batch. Call this after the present batch was taken and recorded as delivered."""
        self.in_hand = None

    def wake(self) -> None:
        """Wake the thread that puts and the thread that takes. Any thread may call, even a finalizer."""
        self._came.put(None)
        self._went.put(None)

    def clear(self) -> None:
        """Drop the waiting batches. Call this after `closed` was set and the thread that puts has ended."""
        self._waiting = deque()  # a new one: the thread that takes may be using the old one
