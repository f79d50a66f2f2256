"""Batches that several workers load: one worker begins a batch, the others write rows into its memory.

A worker begins each batch as a whole. A slow batch (`OPEN_S`, `REST_S`) is opened if the loader allows it: the worker
makes the batch's memory, writes the rows that it has, and returns the batch. The shard then distributes the other rows
to all workers, each of which collates its rows straight into that memory.

The result equals a batch that one worker loads, because torch's default collate joins rows independently. The batch is
loaded again as a whole if later rows collate to a different shape or type, or draw random numbers seeded by batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import Subset, default_collate

from torch_dpflow._core.checks import working
from torch_dpflow._core.stage_clock import StageClock
from torch_dpflow._core.torch_private import default_collate_fn_map, tree_flatten, tree_unflatten
from torch_dpflow.errors import DescriptorLimitError, TransportError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import SharedBlocks
from torch_dpflow.ipc.memory.segment import storage_over, tensor_over
from torch_dpflow.ipc.messages.headers import BATCH, OPENED, UNFIT, Frame, PayloadTable, aligned
from torch_dpflow.ipc.serialization.codec import decode, encode_in
from torch_dpflow.ipc.serialization.pickling import is_plain

#: A batch is opened once its first rows have taken `OPEN_S`, if the others will take about `REST_S` or longer, seconds.
#: A piece costs all processes together about 0.3 ms of processor time.
OPEN_S, REST_S = 0.01, 0.1

#: Bits in a task's number: of the batch's position, and of the part of the batch (0: whole). Higher bits: generation.
POSITION_BITS, PART_BITS = 34, 8
#: Part number of a whole batch that must not be opened.
UNDIVIDED = (1 << PART_BITS) - 1


def task_of(generation: int, position: int, part: int = 0) -> int:
    """Return the number of a task. In each generation it rises with the batch's position, then with the part."""
    return (generation << POSITION_BITS | position) << PART_BITS | part


def generation_of(task: int) -> int:
    return task >> POSITION_BITS + PART_BITS


def part_of(task: int) -> int:
    return task & UNDIVIDED


def position_of(task: int) -> int:
    return (task >> PART_BITS) & ((1 << POSITION_BITS) - 1)


#: Function that collates samples like `default_collate`, and stacks into the given tensors, in turn, while they fit.
CollateAt: TypeAlias = Callable[[list[Any], list[torch.Tensor]], Any]


class Lender(NamedTuple):
    """Worker whose memory contains an opened batch."""

    worker: int
    incarnation: int
    pid: int


class OpenedBatch(NamedTuple):
    """Batch whose memory is allocated and whose first rows are loaded."""

    #: The batch as the default collate makes it, with memory for all rows.
    value: Any
    indices: Sequence[Any]
    #: Number of loaded rows, which are the first ones.
    rows: int
    #: The types of the first sample's leaves, which choose torch's collate functions.
    types: list[str]
    #: Estimated time for loading the other rows, seconds.
    left_s: float
    lender: Lender


class BatchPiece(NamedTuple):
    """Rows of an opened batch, for any worker to load."""

    #: Batch row of the first index.
    begin: int
    indices: Sequence[Any]
    lender: Lender
    #: The encoded `OpenedBatch`.
    table: PayloadTable
    head: bytes


def loads_by_sample(dataset: Any) -> bool:
    """Return whether a dataset, or that inside a torch `Subset`, has no `__getitems__`: samples are read one by one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return not callable(working(dataset, "__getitems__"))


def _joins_rows() -> bool:
    """Return whether every collate function is torch's or ours: these join rows independently of each other."""
    return all(
        function.__module__ in ("torch.utils.data._utils.collate", "torch_dpflow.workers.batch_worker")
        for function in default_collate_fn_map.values()
    )


class PieceLoader:
    """Loader of whole batches and of rows of batches that other workers opened; it opens batches that are slow.

    Args:
        arena: lends the memory of opened batches.
        lender: this worker.
        rows: loads the samples of the given indices; its second argument is the batch row of the first index.
        collate_at: the function `batch_worker.collate_at`.
        clock: measures the times of loading stages.
    """

    def __init__(
        self,
        arena: Arena,
        lender: Lender,
        rows: Callable[[Sequence[Any], int], list[Any]],
        collate_at: CollateAt,
        clock: StageClock,
    ) -> None:
        self._arena, self._lender, self._rows = arena, lender, rows
        self._clock, self._collate, self._collate_at = clock, clock.collating(default_collate), collate_at
        #: Whether batches may be opened. No more after one whose rows do not lie in memory, or draw random numbers.
        self._opens = True
        self._shared: dict[Lender, SharedBlocks] = {}

    def begin(self, index: Sequence[Any], has_drawn: Callable[[], bool]) -> tuple[int, Any]:
        """Load a whole batch, or only its first rows if the batch is slow enough to be opened.

        has_drawn: returns whether the samples drew random numbers that differ if another worker loads them.

        Returns BATCH and the batch, or OPENED and the encoded `OpenedBatch`. Raises errors of samples or of collate.
        """
        samples: list[Any] = []
        count, step, row_s = len(index), 1, math.inf
        begun = now = time.monotonic()
        while True:
            done = len(samples)
            loaded = self._rows(index[done : done + step], done)
            samples += loaded
            if len(samples) == count:
                return BATCH, self._collate(samples)
            before, now = now, time.monotonic()
            row_s = min(row_s, (now - before) / len(loaded))  # without the slow ones among the first rows
            left_s = row_s * (count - len(samples))
            if self._opens and now - begun >= OPEN_S and left_s >= REST_S:
                opened = self._open(index, samples, left_s, has_drawn)
                if opened is not None:
                    return OPENED, opened
            step = 2 * step if self._opens else count

    def _open(
        self, index: Sequence[Any], samples: list[Any], left_s: float, has_drawn: Callable[[], bool]
    ) -> tuple[PayloadTable, list[Frame]] | None:
        if has_drawn() or not _joins_rows():
            self._opens = False
            return None
        leaves: list[Any] = []
        with suppress(Exception):  # raised again, by all samples
            leaves, structure = tree_flatten(self._collate(samples), is_leaf=_has_attributes)
        if not leaves or not all(_is_row_wise(leaf, len(samples)) for leaf in leaves):
            self._opens = False
            return None
        sizes = [leaf.nbytes // len(samples) * len(index) for leaf in leaves]
        block = self._arena.allocate(sum(map(aligned, sizes)))
        if block is None:
            return None
        whole, offset = [], 0
        for leaf, size in zip(leaves, sizes):
            storage = storage_over(block.memory[offset : offset + size])
            whole.append(tensor_over(storage, leaf.dtype, (len(index), *leaf.shape[1:])))
            whole[-1][: len(samples)] = leaf
            offset += aligned(size)
        value = tree_unflatten(whole, structure)
        opened = OpenedBatch(value, index, len(samples), _types(samples[0]), left_s, self._lender)
        return encode_in(opened, block, self._arena)

    def load(self, piece: BatchPiece, has_drawn: Callable[[], bool]) -> tuple[int, bool]:
        """Load rows of an opened batch into its memory. Raises the error of a sample. has_drawn: as in `begin`.

        Returns (BATCH, True), or (UNFIT, flag) if the rows cannot be written there. The flag is False if rows of other
        batches cannot be written either.
        """
        samples = self._rows(piece.indices, piece.begin)
        if has_drawn():
            return UNFIT, False
        blocks = self._shared.setdefault(piece.lender, SharedBlocks(piece.lender.pid))
        try:
            opened: OpenedBatch = decode(piece.table, [piece.head], reader=blocks)
            with blocks.writing(piece.table.blocks[0]) as is_open:
                if not is_open:
                    return UNFIT, True
                if _types(samples[0]) == opened.types and self._write(opened.value, piece.begin, samples):
                    return BATCH, True
        except (TransportError, DescriptorLimitError):
            return UNFIT, True  # that worker has died
        return UNFIT, False

    def _write(self, value: Any, begin: int, samples: list[Any]) -> bool:
        """Collate samples into the rows of `value` starting at `begin`; return whether they fit."""
        leaves, structure = tree_flatten(value)
        rows = [leaf[begin : begin + len(samples)] for leaf in leaves]
        # All but numbers are collated by stacking, in this order.
        places = [place for place in rows if place.dim() > 1]
        try:
            collate = self._clock.collating(lambda data: self._collate_at(data, places))
            collated, own = tree_flatten(collate(samples))
        except Exception:  # raised again, by the whole batch
            return False
        if own != structure or not all(_is_row_wise(leaf, len(samples)) for leaf in collated):
            return False
        storages = {place.untyped_storage().data_ptr() for place in rows}
        for place, leaf in zip(rows, collated):
            if place.dtype != leaf.dtype or place.shape != leaf.shape:
                return False
            if place.data_ptr() != leaf.data_ptr():
                if leaf.untyped_storage().data_ptr() in storages:  # it lies in the rows of another one
                    return False
                place.copy_(leaf)
        return True


def _types(sample: Any) -> list[str]:
    return [str(type(leaf)) for leaf in tree_flatten(sample)[0]]


def _has_attributes(value: Any) -> bool:
    """Return whether flattening would lose attributes of a container, such as an OrderedDict's."""
    return type(value) is not torch.Tensor and bool(getattr(value, "__dict__", None))


def _is_row_wise(leaf: Any, rows: int) -> bool:
    return (
        type(leaf) is torch.Tensor
        and is_plain(leaf)
        and leaf.dim() > 0
        and len(leaf) == rows
        and leaf.nbytes > 0
        and leaf.is_contiguous()
    )
