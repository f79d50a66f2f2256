"""PooledArray: an array as a dataset of its rows, which come from the pool's memory if they are cached there."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from torch_dpflow._core.checks import check_seconds, check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow._core.stage_clock import stage
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.errors import DPFlowError, PeerLostError
from torch_dpflow.ipc.memory.segment import from_array
from torch_dpflow.pool.array_files import ArrayReader, array_identity, array_layout
from torch_dpflow.pool.messages import ArraySource
from torch_dpflow.pool.reader.lookup import check_directory
from torch_dpflow.pool.reader.pool_reader import PoolReader
from torch_dpflow.pool.sources import source_of
from torch_dpflow.pool.transport.address import AddressLike, find_address
from torch_dpflow.pool.transport.authentication import check_keys
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.samplers.indices import whole_numbers

#: Rows as a tensor, or as a numpy array if torch does not have the dtype (text, big-endian numbers).
Rows: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
_Numbers: TypeAlias = npt.NDArray[np.int64]
#: Function that returns writable memory of the given number of bytes, or None if it has none.
Lend: TypeAlias = Callable[[int], "npt.NDArray[np.uint8] | None"]
#: Why a server does not have rows that were pushed.
_NOT_THERE = "its server was lost, it was unloaded, or its push has not finished; push it (again)"


class PooledArray(Dataset[Rows]):
    """Map-style dataset of an array's rows, which come from a pool server's memory if they are cached there.

    As with `PooledDataset`, the server begins to cache the array when it is first read, and a row that is not in memory
    is read from storage. A pushed array has no storage, so reading a missing row raises PeerLostError. Rows are copies.
    Thread-safe; a forked child or an unpickled copy opens separate connections.

    Args:
        source: description of the array, from `open_array`, or from `push`, `append` or `array` of `DataClient`.
        address, connection, trust_network, silence_s: see `PooledDataset`.
        read_options: timeouts, retries and concurrency of reads from storage.

    Raises OptionError or OptionTypeError if an argument is not allowed.
    """

    def __init__(
        self,
        source: ArraySource,
        address: AddressLike = "auto",
        *,
        connection: str | os.PathLike[str] | None = None,
        trust_network: bool = False,
        silence_s: float = 5.0,
        read_options: ReadOptions | None = None,
    ) -> None:
        check_type("source", source, ArraySource, "what open_array has returned")
        self.source = source
        pool = find_address(address, connection, trust_network=trust_network)
        check_keys(pool)
        check_directory(pool)
        check_seconds("silence_s", silence_s)
        self._rows = array_layout(source)
        name, plain = array_identity(source), source_of(source, None)  # raises for options that cannot be sent
        self._reading = PerProcess(partial(PoolReader, pool, plain, name, silence_s))
        self._storage = PerProcess(partial(ArrayReader, source, read_options))
        self._lend: Lend = _lends_nothing

    def __len__(self) -> int:
        return self._rows.records

    def __getitem__(self, index: int) -> Rows:
        """Return row `index`; a negative index counts from the end. Raises the errors of `read_batch`."""
        return self.read_batch([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Rows]:
        return [*self._read(indices, self._lend)]

    def fill_batches(self, lend: Lend) -> None:
        """Set the function that allocates results of `__getitems__`, so that a loader can send them without a copy."""
        self._lend = lend

    def read_batch(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Rows:
        """Return rows in the given order as one tensor of shape (rows, ...), or a numpy array if torch lacks the dtype.

        Raises:
            IndexError: an index is out of range. OptionTypeError: an index is not a whole number.
            PeerLostError: a row of a pushed array is in no server's memory.
            StorageError: a row is not in memory and cannot be read, or its file was replaced.
        """
        return self._read(indices, _lends_nothing)

    @property
    def hits(self) -> int:
        """Number of rows that this process got from the pool's memory, since its last `close` or PeerLostError."""
        return self._reading.get().hits

    @property
    def misses(self) -> int:
        """Number of rows read by this process that were not in memory, since its last `close` or PeerLostError."""
        return self._reading.get().misses

    def close(self) -> None:
        """Close this process's connections, and reset its counts. The dataset can be used again."""
        for opened in (self._reading.drop(), self._storage.drop()):
            if opened is not None:
                opened.close()

    def _read(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]], lend: Lend) -> Rows:
        numbers, rows = self._numbers(indices), self._rows
        memory = lend(len(numbers) * rows.record_bytes)
        if memory is None:
            memory = np.empty(len(numbers) * rows.record_bytes, np.uint8)
        out = memory.view(rows.dtype).reshape(-1, *rows.shape)
        with stage("read"):
            missing = self._copy(numbers, out)
            self._reading.get().count(len(numbers) - len(missing), len(missing))
            if len(missing):
                self._load(numbers, missing, out)
        with suppress(TypeError, ValueError):
            return from_array(out)
        return out

    def _numbers(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> _Numbers:
        given = whole_numbers(indices)
        count = len(self)
        for wrong in given[(given < -count) | (given >= count)][:1]:
            raise IndexError(f"row {wrong} is out of range; {self.source.ref} has {count} rows")
        numbers = given.astype(np.int64)
        return np.where(numbers < 0, numbers + count, numbers)

    def _copy(self, numbers: _Numbers, out: npt.NDArray[Any]) -> _Numbers:
        """Copy mapped rows to `out`; return the positions of all other rows."""
        rows = self._rows
        blocks, block_of = np.unique(numbers // rows.per_block, return_inverse=True)
        is_there = np.zeros(len(numbers), dtype=bool)
        within = numbers % rows.per_block * rows.record_bytes
        for segment, begins in self._reading.get().places(blocks).items():
            own = begins[block_of] >= 0
            if own.any():
                _gather(segment.memory, (begins[block_of] + within)[own], np.flatnonzero(own), out)
            is_there |= own
        if not is_there.all():
            self._receive(numbers, is_there, out)
        return np.flatnonzero(~is_there)

    def _receive(self, numbers: _Numbers, is_there: npt.NDArray[np.bool_], out: npt.NDArray[Any]) -> None:
        """Receive missing rows from other hosts, each directly to its place in `out`."""
        rows, content = self._rows, out.reshape(-1).view(np.uint8).data
        size = rows.record_bytes
        runs = _runs(np.flatnonzero(~is_there), numbers, rows.per_block)
        wanted = [
            WantedRecord(
                row // rows.per_block,
                count * size,
                row % rows.per_block * size,
                content[at * size :][: count * size],
            )
            for at, row, count in runs
        ]
        for (at, _, count), has_come in zip(runs, self._reading.get().fetch(wanted)):
            is_there[at : at + count] = has_come

    def _load(self, numbers: _Numbers, missing: _Numbers, out: npt.NDArray[Any]) -> None:
        if self.source.is_pushed:
            failure = self._reading.get().failure
            self.close()  # so that the next read looks for a server at once
            why = str(failure or _NOT_THERE)
            if isinstance(failure, PeerLostError):
                why += ". Then push the array again"
            raise PeerLostError(
                f"{len(missing)} of these rows of {self.source.ref} are in no server's memory, and in no storage, as "
                f"the array was pushed: {why}"
            )
        spans = [(number, number + 1) for number in numbers[missing].tolist()]
        for at, content in zip(missing.tolist(), self._storage.get().read_rows(spans)):
            if isinstance(content, DPFlowError):
                raise content
            out[at] = np.frombuffer(content, self._rows.dtype).reshape(self._rows.shape)

    def __iter__(self) -> Iterator[Rows]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source.ref}, {len(self)} rows of {self._rows.dtype}{self._rows.shape})"


def _lends_nothing(nbytes: int) -> None:
    return None


def _runs(positions: _Numbers, numbers: _Numbers, per_block: int) -> list[tuple[int, int, int]]:
    """Return first position, first row and length of each run of rows adjacent in a block and in the batch.

    numbers: row at each position of the batch.
    """
    rows = numbers[positions]
    goes_on = (np.diff(positions) == 1) & (np.diff(rows) == 1) & (rows[1:] % per_block != 0)
    firsts = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    counts = np.diff(np.append(firsts, len(rows)))
    return [*zip(positions[firsts].tolist(), rows[firsts].tolist(), counts.tolist())]


def _gather(memory: Any, begins: _Numbers, positions: _Numbers, out: npt.NDArray[Any]) -> None:
    """Copy rows that begin at these bytes of `memory` to these positions of `out`."""
    size = out[:1].nbytes
    first = int(begins[0]) % size
    numbers, rest = np.divmod(begins - first, size)
    if rest.any():  # rows are not at multiples of their size
        content = memoryview(memory)
        for at, begin in zip(positions.tolist(), begins.tolist()):
            out[at] = np.frombuffer(content[begin : begin + size], out.dtype).reshape(out.shape[1:])
        return
    row = np.dtype((np.void, size))
    table = np.frombuffer(memory, row, (len(memory) - first) // size, first)
    if len(positions) == len(out):  # all of them, in order; mode "raise" would copy once more
        assert numbers.max() < len(table)
        np.take(table, numbers, out=out.reshape(-1).view(row), mode="clip")
    else:
        out.reshape(-1).view(row)[positions] = table[numbers]
