"""TableDataset: the rows of Parquet, Arrow and HuggingFace files by number. A row is decoded with its whole block."""

from __future__ import annotations

import io
import json
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from types import NoneType
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torch_dpflow._core.checks import check_type, parse_bytes
from torch_dpflow._core.processes import PerProcess
from torch_dpflow._core.stage_clock import stage
from torch_dpflow._core.threads import RunningLoads, fail
from torch_dpflow.datasets.importers.base import check_not_compressed
from torch_dpflow.datasets.importers.delimited import check_names
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles, find_sources, is_changed
from torch_dpflow.datasets.storage import ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import check_storage_options, is_settled, read_options_of
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.storage.object_reader import disk_cache
from torch_dpflow.datasets.storage.urls import printable_url, stored_url
from torch_dpflow.datasets.table_blocks import (
    ArrowBlocks,
    ParquetBlocks,
    RemoteArrowBlocks,
    errors_of,
    pyarrow_with_formats,
    span_of,
)
from torch_dpflow.datasets.table_files import find_tables, is_parquet
from torch_dpflow.errors import ChecksumError, ObjectMissingError, OptionError, OptionTypeError, SourceError

Blocks = ParquetBlocks | ArrowBlocks | RemoteArrowBlocks

#: Rows of a block up to which they are taken one by one, as a call for all of them costs 60 µs.
_FEW_ROWS = 16
#: Files whose footers are read at a time.
_FOOTERS_AT_ONCE = 16
#: Rows of a file above which its metadata is damaged, so that the rows of all files can be counted in an int64.
_MAX_ROWS = 1 << 48
#: Opened files of a process: files with a descriptor or a parsed footer, and mapped files.
_MAX_OPEN, _MAX_MAPPED = 32, 4096
#: Bytes of memory of a mapped block's objects of Arrow and Python.
_MAPPED_BYTES = 4096


class TableDataset(Dataset[Any]):
    """Map-style dataset of the rows of Parquet or Arrow files. A row is a dict with a value for each column.

    A row is decoded with its block: a row group of Parquet, a record batch of Arrow. Each process keeps the blocks that
    it used last, up to `memory`. Read Parquet in the order of a `BlockShuffleSampler`; in a random order nearly every
    row decodes a block. With `ReadOptions(cache_dir=)`, decoded blocks are also kept on disk and mapped by all
    processes of the host, so that later epochs can be read in any order. Uncompressed Arrow files on a local disk are
    mapped, so they can be read in any order without a cache.

    Reading a file that was changed after the opening is an error. If a column has different types in the files, such as
    int32 and int64, or null, values have a type that holds all. At most 32 files stay open in a process.

    Args:
        url: a file, a directory, a pattern, or a list of files, as in `open_dataset`. A directory is read in the order
            of its names, a directory of HuggingFace's `save_to_disk` in the order of its `state.json`.
        columns: the columns to read; None: all.
        split: the split to read of a directory that has several, such as "train".
        decode: function of a row's dict that returns the sample; None: the dict is the sample.
        storage_options: fsspec's options, such as credentials.
        read_options: timeouts, retries, disk cache.
        memory: maximum bytes of decoded blocks in each process; one block is always kept.

    Raises:
        SourceError: a file is damaged, or its columns do not fit `columns` or the first file; or there are no rows.
        StorageError: a file cannot be read.
        MissingExtraError: pyarrow is not installed.
        OptionError, OptionTypeError: an argument is not allowed.
    """

    def __init__(
        self,
        url: Source | SourceFiles,
        *,
        columns: Sequence[str] | None = None,
        split: str | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        memory: str = "256MiB",
    ) -> None:
        pyarrow_with_formats()
        check_storage_options(storage_options)
        check_type("decode", decode, (Callable, NoneType), "a function of a dict, or None")
        check_type("memory", memory, str, 'a size such as "256MiB"')
        self._memory = parse_bytes("memory", memory)
        self._columns = None if columns is None else _column_names(columns)
        self._schema: Any = None
        self._decode = decode
        self._read_options = read_options_of(read_options)
        found = url if isinstance(url, SourceFiles) else find_sources(url, storage_options, self._read_options)
        self._storage_options = found.options
        self._files = self._find_files(found, split)
        self._opened = PerProcess(partial(_OpenedTable, self))
        counts = self._count_blocks()
        self.blocks = np.array([rows for of_file in counts for rows in of_file], np.int64)
        #: By block: its file, and its number in it.
        self._places = [(number, block) for number, of_file in enumerate(counts) for block in range(len(of_file))]
        self._stops = np.cumsum(self.blocks)
        self._starts = self._stops - self.blocks
        if not len(self):
            given = f"{printable_url(self._files[0].url)}{' and further files' if len(self._files) > 1 else ''}"
            raise SourceError(f"there is nothing to read from {given}: there are no samples; check what wrote it")

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch, in order. Each block is decoded at most once.

        Raises:
            IndexError: there is no such row.
            SourceError, StorageError: its file cannot be read, or was changed.
        """
        count = len(self)
        numbers = np.array([_wrapped(operator.index(index), count) for index in indices], np.int64)
        blocks = self._stops.searchsorted(numbers, side="right")
        rows = numbers - self._starts[blocks]
        positions: dict[int, list[int]] = {}
        wanted: dict[int, list[int]] = {}
        for position, (block, row) in enumerate(zip(blocks.tolist(), rows.tolist(), strict=True)):
            positions.setdefault(block, []).append(position)
            wanted.setdefault(block, []).append(row)
        samples: list[Any] = [None] * len(indices)
        for of_block, found in zip(positions.values(), self._opened.get().rows(wanted), strict=True):
            for position, sample in zip(of_block, found, strict=True):
                if self._decode is None:
                    samples[position] = sample
                else:
                    with stage("decode"):
                        samples[position] = self._decode(sample)
        return samples

    def close(self) -> None:
        """Close this process's files and connections. The dataset can be used again."""
        opened = self._opened.drop()
        if opened is not None:
            opened.close()

    def _find_files(self, found: SourceFiles, split: str | None) -> list[SourceFile]:
        return find_tables(found, split)

    def _count_blocks(self) -> list[list[int]]:
        """Return the rows of each block of each file; set the schema if files differ. Raises SourceError."""
        opened = self._opened.get()
        names = self._columns
        counts: list[list[int]] = []
        schemas: dict[Any, SourceFile] = {}  # each, with the first file that has it
        with ThreadPoolExecutor(min(_FOOTERS_AT_ONCE, len(self._files)), "dpflow-footers") as threads:
            for file, (of_file, schema) in zip(self._files, threads.map(opened.counted, self._files)):
                missing = [name for name in names or () if name not in schema.names]
                if missing:
                    raise SourceError(f"{printable_url(file.url)} has no column {missing}; it has {schema.names}")
                counts.append(of_file)
                selected = schema if names is None else pyarrow_with_formats().schema([*map(schema.field, names)])
                schemas.setdefault(selected, file)
        self._schema = self._joined_schema(schemas)
        return counts

    def _joined_schema(self, schemas: Mapping[Any, SourceFile]) -> Any:
        """Return the schema to which blocks are converted; None if all files have the same one. Raises SourceError."""
        first, *others = schemas
        return _joined(first, {schema: schemas[schema] for schema in others}, self._files[0])

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_opened"}
        return state | {"_storage_options": options_to_pickle(self._storage_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened = PerProcess(partial(_OpenedTable, self))

    def __repr__(self) -> str:
        return f"TableDataset({len(self._files)} files, {len(self)} rows)"


class _OpenedTable:
    """The files, connections and decoded blocks of one process."""

    def __init__(self, table: TableDataset) -> None:
        self._table = table
        self._reader = ObjectReader(table._storage_options, options=table._read_options)
        self._disk = disk_cache(table._read_options)
        self._lock = threading.Lock()
        # A file that leaves is not closed, as another thread may be reading it: it closes with its last reference.
        opened = partial(_opened, self._reader)
        #: Returns the opened file, by whether it is mapped.
        self._files = {False: lru_cache(_MAX_OPEN)(opened), True: lru_cache(_MAX_MAPPED)(opened)}
        #: Decoded blocks, the one used last at the end, and their bytes.
        self._blocks: OrderedDict[int, _DecodedBlock] = OrderedDict()
        self._bytes = 0
        self._running = RunningLoads()
        #: Blocks of local Arrow files that were checked: the files must not change.
        self._checked: set[int] = set()

    def counted(self, file: SourceFile) -> tuple[list[int], Any]:
        """Return the rows of each block of a file, and its schema without metadata."""
        from torch_dpflow.datasets.importers.table_values import field_names

        try:
            opened = _blocks_of(self._reader, file)
        except SourceError:
            (head,) = self._reader.read_many([span_of(file, 0, min(8, file.size))])
            check_not_compressed(head, printable_url(file.url))
            raise
        try:
            with errors_of(file):
                check_names([*field_names(opened.schema)], printable_url(file.url))
                counts = opened.counts()
                if min(counts, default=0) < 0 or sum(counts) > _MAX_ROWS:
                    raise OSError(f"its metadata says that blocks have {min(counts)} to {max(counts)} rows")
                return counts, opened.schema.remove_metadata()
        finally:
            opened.close()

    def rows(self, wanted: Mapping[int, list[int]]) -> list[list[dict[str, Any]]]:
        """Return the rows of each block. wanted: by block, the numbers of rows within it."""
        found = []
        files = {number: self._table._files[number] for number in (self._table._places[block][0] for block in wanted)}
        for file in files.values():  # a mapped file may have changed below the block that is held
            _check_unchanged(file)
        for block, numbers in wanted.items():
            with errors_of(files[self._table._places[block][0]]):
                found.append(self._block(block).rows(numbers))
        for file in files.values():  # it may have been written in place while it was read
            _check_unchanged(file)
        return found

    def _block(self, block: int) -> _DecodedBlock:
        with self._lock:
            if block in self._blocks:
                self._blocks.move_to_end(block)
                return self._blocks[block]
            running, is_joined = self._running.start_or_join(block)
        if is_joined:
            try:
                found: _DecodedBlock = running.result()
            except CancelledError:  # its thread was interrupted
                return self._block(block)
            return found
        try:
            with stage("read"):  # with the decoding of columns, which readers of tables do as they read
                table = self._decoded(block)
        except BaseException as error:
            with self._lock:
                self._running.finish(block, running)
            fail([running], error)
            raise
        file = self._table._files[self._table._places[block][0]]
        opened = self._files[True](file) if _is_mapped(file) else None
        cost = _MAPPED_BYTES + opened.bytes_outside(table) if isinstance(opened, ArrowBlocks) else table.nbytes
        decoded = _DecodedBlock(table, cost)
        with self._lock:
            self._running.finish(block, running)
            self._blocks[block] = decoded
            self._bytes += decoded.cost
            while self._bytes > self._table._memory and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].cost
        running.set_result(decoded)
        return decoded

    def close(self) -> None:
        self._reader.close()
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
            for files in self._files.values():
                files.cache_clear()

    def _decoded(self, block: int) -> Any:
        number, group = self._table._places[block]
        file = self._table._files[number]
        columns, schema = self._table._columns, self._table._schema
        key = None
        is_fixed = is_settled(file.state or "") if file.local_path is None else is_parquet(file)
        if self._disk is not None and is_fixed:
            name = [self._reader.node_of(file.url), stored_url(file.url), file.size, file.state]
            key = json.dumps(["block", *name, group, columns, schema and str(schema)])
            kept = self._disk.get(key, is_mapped=True)
            if kept is not None:
                return pyarrow_with_formats().ipc.open_stream(kept).read_all()
        decoded = self._files[_is_mapped(file)](file).read(group, columns)
        if block not in self._checked:
            self._check(block, decoded)
        if schema is not None:
            fields = [schema.field(name) for name in decoded.schema.names]
            decoded = decoded.cast(pyarrow_with_formats().schema(fields))
        if self._disk is not None and key is not None:
            sink = io.BytesIO()
            with pyarrow_with_formats().ipc.new_stream(sink, decoded.schema) as writer:
                writer.write_table(decoded)
            self._disk.put(key, sink.getvalue())
        return decoded

    def _check(self, block: int, decoded: Any) -> None:
        """Raise OSError or ArrowInvalid if a block is damaged. A block of a local Arrow file is checked once."""
        from torch_dpflow.datasets.importers.table_values import check_offsets

        counted = self._table.blocks[block]
        if decoded.num_rows != counted:
            raise OSError(f"a block has {decoded.num_rows} rows, and {counted} by its metadata")
        check_offsets(decoded)
        if _is_mapped(self._table._files[self._table._places[block][0]]):
            self._checked.add(block)


def _opened(reader: ObjectReader, file: SourceFile) -> Blocks:
    """Open a file of a table again. Raises an error if it has changed."""
    _check_unchanged(file)
    return _blocks_of(reader, file)


def _blocks_of(reader: ObjectReader, file: SourceFile) -> Blocks:
    if is_parquet(file):
        return ParquetBlocks(file, reader)
    return RemoteArrowBlocks(file, reader) if file.local_path is None else ArrowBlocks(file, file.local_path)


def _is_mapped(file: SourceFile) -> bool:
    return file.local_path is not None and not is_parquet(file)


def _check_unchanged(file: SourceFile) -> None:
    """Raise an error if a local file was removed or written again. Other storages check states when they read."""
    if is_changed(file):
        if not os.path.exists(file.local_path or ""):
            raise ObjectMissingError(f"{printable_url(file.url)}: there is no such file; restore it")
        raise ChecksumError(f"{printable_url(file.url)} was written again after it was opened; open the dataset again")


def _joined(first: Any, others: Mapping[Any, SourceFile], file: SourceFile) -> Any:
    """Return a schema that can hold the values of all files; None if all schemas are equal. Raises SourceError."""
    pyarrow = pyarrow_with_formats()
    joined = first
    for schema, other in others.items():
        try:
            if {*schema.names} != {*first.names}:
                raise ValueError("they have other columns")
            before, joined = joined, pyarrow.unify_schemas([joined, schema], promote_options="permissive")
            changed = [
                name for one in (before, schema) for name in one.names if _loses(one.field(name), joined.field(name))
            ]
            if changed:
                raise ValueError(f"{changed[0]!r} has no type for the values of both")
        except (pyarrow.ArrowException, ValueError) as error:
            raise SourceError(
                f"{printable_url(other.url)} has the columns {_shown(schema)}, and {printable_url(file.url)} has "
                f"{_shown(first)}; give files of one table ({error})"
            ) from error
    return joined if others else None


def _loses(field: Any, joined: Any) -> bool:
    """Return whether a joined column rounds decimals to floating point, or makes bytes of texts."""
    types = pyarrow_with_formats().types
    is_text = types.is_string(field.type) or types.is_large_string(field.type) or types.is_string_view(field.type)
    becomes_bytes = types.is_binary(joined.type) or types.is_large_binary(joined.type)
    return bool(types.is_decimal(field.type) and types.is_floating(joined.type)) or (is_text and becomes_bytes)


def _shown(schema: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _wrapped(number: int, count: int) -> int:
    if not -count <= number < count:
        raise IndexError(f"row {number} is out of range; there are {count}")
    return number % count


class _DecodedBlock:
    """A decoded block. Its columns are separated once, because this takes longer than reading a row."""

    def __init__(self, table: Any, cost: int) -> None:
        self.table = table
        #: bytes of memory
        self.cost = cost
        self._names = table.column_names
        self._columns = [column.chunk(0) if column.num_chunks == 1 else column for column in table.columns]

    def rows(self, numbers: list[int]) -> list[dict[str, Any]]:
        if len(numbers) > _FEW_ROWS:
            with suppress(pyarrow_with_formats().ArrowNotImplementedError):  # of views and run-end encoded columns
                return self.table.take(numbers).to_pylist()  # type: ignore[no-any-return]
        columns = [[column[number].as_py() for number in numbers] for column in self._columns]
        return [dict(zip(self._names, values)) for values in zip(*columns, strict=True)]


def _column_names(columns: Sequence[str]) -> list[str]:
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
    if not (is_list and all(isinstance(name, str) for name in columns)):
        raise OptionTypeError(f"columns={columns!r:.80}: give a list of names, or None")
    if len({*columns}) < len(columns) or not columns:
        raise OptionError(f"columns={columns!r:.80}: give each name once, and at least one")
    return list(columns)
