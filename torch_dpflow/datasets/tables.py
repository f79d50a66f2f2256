"""TableDataset: rows of Parquet, Arrow and HuggingFace files by number, where a row cannot be read alone."""

from __future__ import annotations

import io
import json
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torch_dpflow._core.checks import check_type, parse_bytes
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.importers.delimited import check_names
from torch_dpflow.datasets.sample_reader import check_storage_options
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.storage.object_reader import disk_cache
from torch_dpflow.datasets.storage.states import is_settled
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.datasets.table_files import TableFile, find_tables
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError, SourceError

#: Bytes that are searched between the pages of a Parquet file and its footer, where indexes and filters lie.
_MAX_BETWEEN = 16 << 20
#: Ends a stream: no further message.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
#: Rows of a block up to which they are taken one by one, as a call for all of them costs 60 µs.
_FEW_ROWS = 16
#: Files whose footers are read at a time.
_FOOTERS_AT_ONCE = 16


class TableDataset(Dataset[Any]):
    """Map-style dataset of the rows of Parquet or Arrow files. A sample is a dict with a value for each column.

    A row is decoded with its block: a row group of Parquet, a record batch of Arrow. Each process keeps the blocks that
    it used last, up to `memory`. Read Parquet in the order of a `BlockShuffleSampler`; in a random order nearly every
    row decodes a block. With `ReadOptions(cache_dir=)`, decoded blocks are also kept on disk and mapped by all
    processes of the host, so that later epochs may be read in any order. Arrow files on a local disk are mapped as they
    are, and need neither.

    Files are compared with their state at opening: a changed one is an error.

    Args:
        url: a file, a directory, or a list of files. A directory is read in the order of its names; one that
            HuggingFace's `save_to_disk` wrote, in the order of its `state.json`.
        columns: the columns to read; None: all.
        split: the split to read of a directory that has several, such as "train".
        decode: called with each sample; its result is the sample.
        storage_options: fsspec's options, such as credentials.
        read_options: timeouts, retries, disk cache.
        memory: maximum bytes of decoded blocks in each process; one block is always kept.

    Raises:
        SourceError: a file is damaged, has other columns than the first, or there is none.
        StorageError: a file cannot be read.
        MissingExtraError: pyarrow is not installed.
        OptionError, OptionTypeError: an argument is not allowed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        split: str | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        memory: str = "256MiB",
    ) -> None:
        _pyarrow()
        check_storage_options(storage_options)
        if decode is not None and not callable(decode):
            raise OptionTypeError(f"decode={decode!r:.80}: give a function of a dict, or None")
        check_type("memory", memory, str, 'a size such as "256MiB"')
        self._memory = parse_bytes("memory", memory)
        self._columns = None if columns is None else _column_names(columns)
        self._decode = decode
        self._storage_options = dict(storage_options or {})
        self._read_options = read_options if read_options is not None else ReadOptions()
        check_type("read_options", self._read_options, ReadOptions, "a ReadOptions, or None")
        self._files = find_tables(url, self._storage_options, self._read_options, split)
        self._opened = PerProcess(self._open)
        counts = self._count_blocks()
        #: Rows of each block, in order.
        self.blocks = np.array([rows for of_file in counts for rows in of_file], np.int64)
        #: By block: its file, and its number in it.
        self._places = [(number, block) for number, of_file in enumerate(counts) for block in range(len(of_file))]
        self._stops = np.cumsum(self.blocks)
        self._starts = self._stops - self.blocks

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch, in order. Each block is decoded once.

        Raises:
            IndexError: there is no such row.
            SourceError, StorageError: its file cannot be read, or was changed.
        """
        count = len(self)
        numbers = np.array([_wrapped(operator.index(index), count) for index in indices], np.int64)
        blocks = np.searchsorted(self._stops, numbers, side="right")
        rows = numbers - self._starts[blocks]
        positions: dict[int, list[int]] = {}
        wanted: dict[int, list[int]] = {}
        for position, (block, row) in enumerate(zip(blocks.tolist(), rows.tolist(), strict=True)):
            positions.setdefault(block, []).append(position)
            wanted.setdefault(block, []).append(row)
        samples: list[Any] = [None] * len(indices)
        for of_block, found in zip(positions.values(), self._opened.get().rows(wanted), strict=True):
            for position, sample in zip(of_block, found, strict=True):
                samples[position] = sample if self._decode is None else self._decode(sample)
        return samples

    def close(self) -> None:
        """Close this process's files and connections. The dataset may be used again."""
        opened = self._opened.drop()
        if opened is not None:
            opened.close()

    def _count_blocks(self) -> list[list[int]]:
        opened = self._opened.get()
        with ThreadPoolExecutor(min(_FOOTERS_AT_ONCE, len(self._files)), "dpflow-footers") as threads:
            counted = list(threads.map(opened.counts, range(len(self._files))))
        first = counted[0][1]
        for file, (_, columns) in zip(self._files, counted, strict=True):
            if columns != first:
                raise SourceError(
                    f"{without_login(file.url)} has the columns {columns}, and {without_login(self._files[0].url)} has "
                    f"{first}; give files of one table"
                )
        missing = [name for name in self._columns or () if name not in first]
        if missing:
            raise SourceError(f"{without_login(self._files[0].url)} has no column {missing}; it has {list(first)}")
        return [counts for counts, _ in counted]

    def _open(self) -> _OpenedTable:
        return _OpenedTable(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_opened"}
        return state | {"_storage_options": options_to_pickle(self._storage_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened = PerProcess(self._open)

    def __repr__(self) -> str:
        return f"TableDataset({len(self._files)} files, {len(self)} rows)"


class _OpenedTable:
    """The files, connections and decoded blocks of one process."""

    def __init__(self, table: TableDataset) -> None:
        self._table = table
        self._reader = ObjectReader(table._storage_options, options=table._read_options)
        self._disk = disk_cache(table._read_options)
        self._lock = threading.Lock()
        self._files: dict[int, Any] = {}
        #: Decoded blocks, the one used last at the end, and their bytes.
        self._blocks: OrderedDict[int, _DecodedBlock] = OrderedDict()
        self._bytes = 0

    def counts(self, number: int) -> tuple[list[int], dict[str, str]]:
        """Return the rows of each block of a file, and the types of its columns."""
        file = self._file(number)
        from torch_dpflow.datasets.importers.table_values import field_names

        check_names([*field_names(file.schema)], without_login(self._table._files[number].url))
        return file.counts, {field.name: str(field.type) for field in file.schema}

    def rows(self, wanted: Mapping[int, list[int]]) -> Iterator[list[dict[str, Any]]]:
        """Yield rows of each block, by their numbers in it."""
        unchanged = set()
        for block, numbers in wanted.items():
            number = self._table._places[block][0]
            file = self._table._files[number]
            with _errors_of(file):
                decoded = self._block(block)
                if number not in unchanged:  # a mapped file may have changed below the block that is held
                    file.check_unchanged()
                    unchanged.add(number)
                rows = decoded.rows(numbers)
            yield rows

    def _block(self, block: int) -> _DecodedBlock:
        with self._lock:
            if block in self._blocks:
                self._blocks.move_to_end(block)
                return self._blocks[block]
        decoded = _DecodedBlock(self._decoded(block))
        with self._lock:
            if block not in self._blocks:
                self._blocks[block] = decoded
                self._bytes += decoded.table.nbytes
            while self._bytes > self._table._memory and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].table.nbytes
        return decoded

    def close(self) -> None:
        self._reader.close()
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _decoded(self, block: int) -> Any:
        number, group = self._table._places[block]
        file = self._table._files[number]
        columns = self._table._columns
        key = None
        is_mapped = file.path() is not None and not file.is_parquet
        if file.state is not None and (file.path() is not None or is_settled(file.state)) and not is_mapped:
            key = json.dumps(["block", file.url, file.state, group, columns])
        if self._disk is not None and key is not None:
            kept = self._disk.map(key)
            if kept is not None:
                return _pyarrow().ipc.open_stream(kept).read_all()
        decoded = self._file(number).read(group, columns)
        if self._disk is not None and key is not None:
            sink = io.BytesIO()
            with _pyarrow().ipc.new_stream(sink, decoded.schema) as writer:
                writer.write_table(decoded)
            self._disk.put(key, sink.getvalue())
        return decoded

    def _file(self, number: int) -> _ParquetFile | _ArrowFile:
        with self._lock:
            if number in self._files:
                return self._files[number]  # type: ignore[no-any-return]
        file = self._table._files[number]
        opened = (_ParquetFile if file.is_parquet else _ArrowFile)(file, self._reader)
        with self._lock:
            return self._files.setdefault(number, opened)  # type: ignore[no-any-return]


def _wrapped(number: int, count: int) -> int:
    if not -count <= number < count:
        raise IndexError(f"row {number} is out of range; there are {count}")
    return number % count


class _DecodedBlock:
    """A decoded block. Its columns are taken apart once, as this costs more than a row."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self._names = table.column_names
        self._columns = [column.chunk(0) if column.num_chunks == 1 else column for column in table.columns]

    def rows(self, numbers: list[int]) -> list[dict[str, Any]]:
        if len(numbers) > _FEW_ROWS:
            with suppress(_pyarrow().ArrowNotImplementedError):  # of views and run-end encoded columns
                return self.table.take(numbers).to_pylist()  # type: ignore[no-any-return]
        columns = [[column[number].as_py() for number in numbers] for column in self._columns]
        return [dict(zip(self._names, values)) for values in zip(*columns, strict=True)]


class _ParquetFile:
    """A Parquet file whose row groups are blocks."""

    def __init__(self, file: TableFile, reader: ObjectReader) -> None:
        self._file = file
        self._lock = threading.Lock()  # of Arrow's reader, which is not thread-safe
        with _errors_of(file):
            source = _source(file, reader)
            self._parquet = _pyarrow().parquet.ParquetFile(
                source, pre_buffer=file.path() is None, page_checksum_verification=True
            )
            metadata = self._parquet.metadata
            self.schema = self._parquet.schema_arrow
            self.counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            if file.path() is not None:
                _check_begins_once(str(source), metadata)

    def read(self, block: int, columns: list[str] | None) -> Any:
        with self._lock, _errors_of(self._file):
            self._file.check_unchanged()
            return self._parquet.read_row_group(block, columns=columns, use_threads=False)

    def close(self) -> None:
        self._parquet.close()


def _check_begins_once(path: str, metadata: Any) -> None:
    """Raise OSError if Parquet files were joined: the footer of the last one has the positions of its own pages."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    stop = max((_start(chunk) + chunk.total_compressed_size for chunk in chunks), default=4)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(stop)
        between = file.read(min(max(0, size - 8 - metadata.serialized_size - stop), _MAX_BETWEEN))
    if b"PAR1PAR1" in between:
        raise OSError("it goes on after the end of a first table; files were joined")


def _start(chunk: Any) -> int:
    pages = chunk.data_page_offset
    return min(pages, chunk.dictionary_page_offset) if chunk.has_dictionary_page else pages  # type: ignore[no-any-return]


class _ArrowFile:
    """An Arrow file whose record batches are blocks: mapped if it is local, else read by ranges."""

    def __init__(self, file: TableFile, reader: ObjectReader) -> None:
        self._file = file
        pyarrow = _pyarrow()
        with _errors_of(file):
            path = file.path()
            self._source = pyarrow.memory_map(path) if path else pyarrow.PythonFile(_source(file, reader), "r")
            self._batches: list[Any] | None = None
            try:
                self._arrow = pyarrow.ipc.open_file(self._source)
                batches = [self._arrow.get_batch(number) for number in range(self._arrow.num_record_batches)]
            except pyarrow.ArrowInvalid as error:
                if path is None:
                    raise SourceError(
                        f"{file.url} is no Arrow file with a footer ({error}); its format as a stream can be read from "
                        "a local disk only: copy it there, or write Parquet"
                    ) from error
                self._source.seek(0)
                self._arrow = pyarrow.ipc.open_stream(self._source)
                batches = list(self._arrow)
                if self._source.tell() != self._source.size():
                    raise OSError("it goes on after the end of its stream; streams were joined") from error
                self._source.seek(max(0, self._source.size() - len(_END_OF_STREAM)))
                if self._source.read() != _END_OF_STREAM:  # Arrow takes the end of the file for that of the stream
                    raise OSError("it ends without an end-of-stream mark; it was cut short") from error
            else:
                if path is not None:
                    _check_one_file(self._source)
            if path is not None:
                self._batches = batches  # maps, and no memory
            self.schema = self._arrow.schema
            self.counts = [batch.num_rows for batch in batches]

    def read(self, block: int, columns: list[str] | None) -> Any:
        with _errors_of(self._file):
            self._file.check_unchanged()
            batch = self._arrow.get_batch(block) if self._batches is None else self._batches[block]
            table = _pyarrow().Table.from_batches([batch])
            return table if columns is None else table.select(columns)

    def close(self) -> None:
        self._batches = None
        self._source.close()


def _check_one_file(source: Any) -> None:
    """Raise OSError if Arrow files were joined: the footer of the last one has the positions of its own batches."""
    size = source.size()
    source.seek(size - 10)
    footer = int.from_bytes(source.read(4), "little")
    source.seek(8)
    for _ in _pyarrow().ipc.open_stream(source):
        pass
    if source.tell() != size - 10 - footer:
        raise OSError("it goes on after the end of its batches; files were joined")


class _RangeFile(io.RawIOBase):
    """An object as a file that is read by ranges, with the reader's retries, checks and disk cache."""

    def __init__(self, file: TableFile, reader: ObjectReader) -> None:
        self._file = file
        self._reader = reader
        self._position = 0
        assert file.size is not None
        self._size = file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, count: int = -1, /) -> bytes:
        stop = self._size if count < 0 else min(self._size, self._position + count)
        span = ByteRange(self._file.url, self._position, max(stop, self._position), self._size, self._file.state)
        (data,) = self._reader.read_many([span])
        self._position += len(data)
        return data


class _errors_of:
    """Raise Arrow's errors as a SourceError that names the file."""

    def __init__(self, file: TableFile) -> None:
        self._url = without_login(file.url)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Arrow raises OSError for damaged pages; our errors of storages are DPFlowErrors, and pass.
        if error is not None and (isinstance(error, _pyarrow().ArrowException) or type(error) is OSError):
            raise SourceError(f"{self._url} cannot be read: {error}") from error


def _source(file: TableFile, reader: ObjectReader) -> Any:
    path = file.path()
    if path is not None:
        file.check_unchanged()
        return path
    if file.size is None:
        raise SourceError(f"{without_login(file.url)}: the storage does not report its size; copy it to a local disk")
    return _RangeFile(file, reader)


def _column_names(columns: Sequence[str]) -> list[str]:
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise OptionTypeError(f"columns={columns!r:.80}: give a list of names, or None")
    if len({*columns}) < len(columns) or not columns:
        raise OptionError(f"columns={columns!r:.80}: give each name once, and at least one")
    return list(columns)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "Parquet and Arrow need pyarrow; install it with: pip install 'torch_dpflow[datasets]'"
        ) from error
    return pyarrow
