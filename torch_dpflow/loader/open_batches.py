"""Division of slow batches: one worker opens a batch (loads its first rows), then all workers load pieces of it.

Only a private shard's thread uses this module, which does no I/O. Pieces are tasks like whole batches: they can be
stolen, are repeated after a worker's death, and have the time limit of a task.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from torch_dpflow.ipc.messages.headers import BATCH, FAILURE, Frame, PayloadTable
from torch_dpflow.workers.batch_pieces import UNDIVIDED, BatchPiece, OpenedBatch, part_of

#: Intended time to load one piece, seconds; maximum number of a batch's pieces for each worker.
PIECE_S, PIECES_EACH = 0.025, 16


class Opening(NamedTuple):
    """State of a batch when a worker opened it."""

    opened: OpenedBatch
    #: The `OpenedBatch`, encoded for other workers.
    payload: PayloadTable
    head: Frame
    #: Function that ends the workers' writing into the batch; returns False if that fails.
    end_writing: Callable[[], bool]


@dataclass
class _Open:
    opening: Opening
    #: The tasks that are not finished.
    left: set[int] = field(default_factory=set)
    #: The first row's task that has failed, and its error.
    failure: tuple[int, Any] | None = None


class OpenBatches:
    """Collection of open batches: divides their rows into tasks, and delivers each batch once its rows are loaded.

    Args:
        submit: submits (task, payload) pairs, to be loaded before all batches at later positions.
        cancel: cancels tasks.
        deliver: called with a batch's task, kind, value and payload; None instead of the payload of an error.
    """

    def __init__(
        self,
        workers: int,
        submit: Callable[[Sequence[tuple[int, Frame]]], None],
        cancel: Callable[[Sequence[int]], None],
        deliver: Callable[[int, int, Any, PayloadTable | None], None],
    ) -> None:
        self._workers = workers
        self._submit, self._cancel, self._deliver = submit, cancel, deliver
        self._batches: dict[int, _Open] = {}
        #: Whether batches may be opened; False once the rows of a batch could not be joined, for all later batches.
        self.opens = True

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, task: int, opening: Opening) -> None:
        """Divide the remaining rows of a batch among workers, as tasks; if `opens` is False, the batch is one task."""
        batch, opened = _Open(opening), opening.opened
        self._batches[task] = batch
        if not self.opens:
            self._load_whole(task)
            return
        left = len(opened.indices) - opened.rows
        count = min(ceil(opened.left_s / PIECE_S), PIECES_EACH * self._workers, left, UNDIVIDED - 1)
        bounds = [opened.rows + left * number // count for number in range(count + 1)]
        pieces = []
        for number, (begin, end) in enumerate(pairwise(bounds), 1):
            piece = BatchPiece(begin, opened.indices[begin:end], opened.lender, opening.payload, bytes(opening.head))
            pieces.append((task + number, pickle.dumps(piece, pickle.HIGHEST_PROTOCOL)))
        batch.left = {number for number, _ in pieces}
        self._submit(pieces)

    def finish(self, task: int, kind: int, value: Any) -> None:
        batch = self._batches.get(task - part_of(task))
        if batch is None or task not in batch.left:
            return
        batch.left.discard(task)
        if kind == FAILURE:
            # The error of the lowest row is the one that a single worker would have met.
            batch.failure = task, value
            later = [number for number in batch.left if number > task]
            batch.left.difference_update(later)
            self._cancel(later)
        elif kind != BATCH:
            self.opens = self.opens and bool(value)
            self._load_whole(task - part_of(task))
            return
        if not batch.left:
            self._end(task - part_of(task), batch)

    def drop(self, task: int) -> int:
        """Drop the open batch to which this task belongs, if any; return the task that began the batch."""
        whole = task - part_of(task)
        batch = self._batches.pop(whole, None)
        if batch is not None:
            self._cancel([*batch.left])
        return whole

    def clear(self) -> None:
        """Forget all batches. The caller has to cancel their tasks."""
        self._batches.clear()

    def _end(self, task: int, batch: _Open) -> None:
        if batch.failure is not None:
            del self._batches[task]
            self._deliver(task, FAILURE, batch.failure[1], None)
        elif batch.opening.end_writing():
            del self._batches[task]
            self._deliver(task, BATCH, batch.opening.opened.value, batch.opening.payload)
        else:  # a worker whose piece was taken over writes into it now, or the lender has died
            self._load_whole(task)

    def _load_whole(self, task: int) -> None:
        batch = self._batches.pop(task)
        self._cancel([*batch.left])
        self._submit([(task + UNDIVIDED, pickle.dumps(batch.opening.opened.indices, pickle.HIGHEST_PROTOCOL))])
