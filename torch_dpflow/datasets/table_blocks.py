"""Files of a table whose blocks are read one by one: row groups of Parquet, record batches of Arrow."""

from __future__ import annotations

import io
import os
import struct
import threading
from types import TracebackType
from typing import Any

from torch_dpflow._core.lazy import imported
from torch_dpflow.datasets.importers.sources import SourceFile
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.failures import storage_error
from torch_dpflow.datasets.storage.urls import printable_url
from torch_dpflow.errors import DPFlowError, SourceError
from torch_dpflow.log import DATASETS

#: Bytes that are searched between the pages of a Parquet file and its footer, where indexes and filters lie.
_MAX_BETWEEN = 16 << 20
#: Ends a stream: no further message.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
#: Bytes between the last batch of a file and its footer, at most: an end of stream and padding.
_MAX_END = 64
#: At the end of an Arrow file: the length of its footer, and this.
_MAGIC = b"ARROW1"
#: At the end of a chunk of LitData that has rows: the length of an Arrow file, and this.
_ROWS = b"LDARW01\0"
ROWS_MARK = len(_ROWS) + 4
_MAX_FOOTER = 256 << 20
#: Bytes at the end of a remote file that are read at once, as most footers are shorter.
_FOOTER_GUESS = 64 << 10


class ParquetBlocks:
    """Reader of a Parquet file, whose blocks are its row groups. A local file stays open."""

    def __init__(self, file: SourceFile, reader: ObjectReader) -> None:
        self._file = file
        self._reader = reader
        self._unread = _UnreadFile(file, reader)
        self._lock = threading.Lock()  # of Arrow's reader, which is not thread-safe
        path = file.local_path
        with errors_of(file):
            pyarrow = pyarrow_with_formats()
            # A path as bytes, as it may be no UTF-8.
            self._source = RangeFile(file, reader) if path is None else pyarrow.OSFile(os.fsencode(path))
            self._parquet = pyarrow.parquet.ParquetFile(
                self._source, pre_buffer=path is None, page_checksum_verification=True
            )
            self.schema = self._parquet.schema_arrow

    def counts(self) -> list[int]:
        """Return the number of rows of each block. Raises SourceError for damage, and for most concatenated files."""
        with errors_of(self._file):
            metadata = self._parquet.metadata
            self._check_begins_once(metadata)
            return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def read(self, block: int, columns: list[str] | None) -> Any:
        with self._lock, errors_of(self._file):
            return self._parquet.read_row_group(block, columns=columns, use_threads=False)

    def close(self) -> None:
        self._parquet.close()
        self._source.close()

    def _check_begins_once(self, metadata: Any) -> None:
        """Raise OSError if Parquet files were joined: the last footer lists only the pages of the last file.

        Most writers leave nothing between pages and footer, so that nothing is read.
        """
        start = _end_of_pages(self._unread, metadata)
        stop = min(self._file.size - 8 - metadata.serialized_size, start + _MAX_BETWEEN)
        if stop > start and b"PAR1PAR1" in self._reader.read_many([span_of(self._file, start, stop)])[0]:
            raise OSError("it goes on after the end of a first table; files were joined")


def _end_of_pages(unread: _UnreadFile, metadata: Any) -> int:
    """Return where the last row group ends. Raises OSError or ArrowException if its metadata is damaged."""
    if not metadata.num_row_groups:
        return 4
    last = metadata.num_row_groups - 1
    # `column` ends the process by metadata that the reader refuses, so the reader sees it first. It needs no page.
    parquet = pyarrow_with_formats().parquet.ParquetFile(unread, metadata=metadata, buffer_size=1)
    try:
        parquet.read_row_group(last, use_threads=False)
    except (OSError, pyarrow_with_formats().ArrowException):
        if not unread.is_read:
            raise
    group = metadata.row_group(last)
    chunks = [group.column(number) for number in range(group.num_columns)]
    return max((_start(chunk) + chunk.total_compressed_size for chunk in chunks), default=4)


def _start(chunk: Any) -> int:
    pages = chunk.data_page_offset
    return min(pages, chunk.dictionary_page_offset) if chunk.has_dictionary_page else pages  # type: ignore[no-any-return]


class ArrowBlocks:
    """Reader of a local Arrow file, whose blocks are its record batches. The file is mapped, and does not stay open."""

    def __init__(self, file: SourceFile, path: str) -> None:
        self._file = file
        #: batches of a stream, which has no table of its batches
        self._batches: list[Any] | None = None
        pyarrow = pyarrow_with_formats()
        with errors_of(file):
            with pyarrow.memory_map(os.fsencode(path)) as mapped:  # the map outlives the descriptor
                whole = mapped.read_buffer()
            self._addresses = range(whole.address, whole.address + whole.size)
            start, stop = arrow_span(file, whole[-ROWS_MARK:].to_pybytes())
            self._source = pyarrow.BufferReader(whole[start:stop])
            try:
                self._arrow = pyarrow.ipc.open_file(self._source)
            except pyarrow.ArrowInvalid:
                self._source.seek(0)
                try:
                    self._arrow = pyarrow.ipc.open_stream(self._source)
                    self._batches = list(self._arrow)  # maps, and no memory
                except (pyarrow.ArrowInvalid, OSError) as error:
                    raise OSError(f"it was cut short or is damaged, or is no Arrow file: {error}") from error
            self.schema = self._arrow.schema

    def counts(self) -> list[int]:
        """Return the number of rows of each block. Raises SourceError for a damaged file, or concatenated files."""
        with errors_of(self._file):
            if self._batches is not None:
                self._check_end_of_stream()
                return [batch.num_rows for batch in self._batches]
            _check_one_file(self._source)
            return [self._arrow.get_batch(number).num_rows for number in range(self._arrow.num_record_batches)]

    def read(self, block: int, columns: list[str] | None) -> Any:
        with errors_of(self._file):
            batch = self._arrow.get_batch(block) if self._batches is None else self._batches[block]
            table = pyarrow_with_formats().Table.from_batches([batch])
            return table if columns is None else table.select(columns)

    def bytes_outside(self, table: Any) -> int:
        """Return how many bytes of a decoded block are copies and not in the mapped file, such as decompressed ones."""
        chunks = [chunk for column in table.columns for chunk in column.chunks]
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers() if buffer is not None]
        return sum(buffer.size for buffer in buffers if buffer.address not in self._addresses)

    def close(self) -> None:
        """Close the file. Blocks that were read stay valid."""
        self._batches = None
        self._source.close()

    def _check_end_of_stream(self) -> None:
        if self._source.tell() != self._source.size():
            raise OSError("it goes on after the end of its stream; streams were joined")
        self._source.seek(max(0, self._source.size() - len(_END_OF_STREAM)))
        if self._source.read() != _END_OF_STREAM:  # Arrow takes the end of the file for that of the stream
            DATASETS.warning(
                "%s ends without an end-of-stream mark: if it was cut there, its last rows are missing",
                printable_url(self._file.url),
            )


class RemoteArrowBlocks:
    """Reader of an Arrow file on a remote storage, whose blocks are its record batches.

    Rows are counted without reading the blocks. Raises SourceError for a file without a footer, such as a stream.
    """

    def __init__(self, file: SourceFile, reader: ObjectReader) -> None:
        self._file = file
        self._reader = reader
        #: Where the Arrow file begins in the file.
        self._start = 0
        with errors_of(file):
            tail = self._read((max(0, file.size - _FOOTER_GUESS), file.size))[0]
            self._start, stop = arrow_span(file, tail)
            tail, size = tail[: len(tail) - (file.size - stop)], stop - self._start
            length = int.from_bytes(tail[-len(_MAGIC) - 4 : -len(_MAGIC)], "little")
            if not tail.endswith(_MAGIC) or not 0 < length <= min(_MAX_FOOTER, size - len(_MAGIC) - 4):
                raise SourceError(
                    f"{printable_url(file.url)} has no footer of an Arrow file: it was cut short, or is a stream, "
                    "which can be read from a local disk only; write it again, or copy it there, or write Parquet"
                )
            end = size - len(_MAGIC) - 4
            footer = tail[-length - len(_MAGIC) - 4 : -len(_MAGIC) - 4]
            if len(footer) < length:
                footer = self._read((end - length, end))[0]
            dictionaries, self._messages = (_messages_of(footer, number, end - length) for number in (2, 3))
            first = min([start for start, _, _ in [*dictionaries, *self._messages]], default=end - length)
            last = max([sum(one) for one in [*dictionaries, *self._messages]], default=end - length)
            if end - length - last > _MAX_END:
                raise OSError("it goes on after the end of its batches; files were joined")
            spans = [(8, first), *((start, start + metadata + body) for start, metadata, body in dictionaries)]
            self._head = b"".join(self._read(*spans))
            self.schema = self._stream(b"").schema

    def counts(self) -> list[int]:
        """Return the number of rows of each block. Reads only the metadata at the start of each block."""
        with errors_of(self._file):
            spans = [(start, start + metadata) for start, metadata, _ in self._messages]
            return [_rows_of(data) for data in self._read(*spans)]

    def read(self, block: int, columns: list[str] | None) -> Any:
        start, metadata, body = self._messages[block]
        with errors_of(self._file):
            table = self._stream(self._read((start, start + metadata + body))[0]).read_all()
            return table if columns is None else table.select(columns)

    def close(self) -> None:
        """Do nothing: the `ObjectReader` owns the connections."""

    def _read(self, *spans: tuple[int, int]) -> list[bytes]:
        at = self._start
        return self._reader.read_many([span_of(self._file, at + start, at + stop) for start, stop in spans])

    def _stream(self, messages: bytes) -> Any:
        ipc = pyarrow_with_formats().ipc
        return ipc.open_stream(pyarrow_with_formats().py_buffer(self._head + messages + _END_OF_STREAM))


def arrow_span(file: SourceFile, tail: bytes) -> tuple[int, int]:
    """Return start and stop of the Arrow data in a file: all of the file, or the rows in a chunk of LitData (.bin).

    tail: the end of the file, at least `ROWS_MARK` bytes. Raises SourceError if a chunk contains no Arrow rows.
    """
    if not file.url.endswith(".bin"):
        return 0, file.size
    span = rows_in_chunk(tail, file.size)
    if span is None:
        raise SourceError(
            f"{file.printable} does not end with rows in Arrow's format, as the first chunk of the dataset does; it is "
            "damaged, or of another dataset"
        )
    return span


def rows_in_chunk(tail: bytes, size: int) -> tuple[int, int] | None:
    """Return start and stop of the Arrow rows in a LitData chunk of `size` bytes; None if it has no such rows.

    tail: the end of the chunk, at least `ROWS_MARK` bytes.
    """
    length, stop = int.from_bytes(tail[-ROWS_MARK : -len(_ROWS)], "little"), size - ROWS_MARK
    return (stop - length, stop) if tail.endswith(_ROWS) and 0 < length <= stop else None


def _check_one_file(source: Any) -> None:
    """Raise OSError if Arrow files were joined: the last footer lists only the batches of the last file."""
    size = source.size()
    source.seek(size - 10)
    footer = int.from_bytes(source.read(4), "little")
    source.seek(8)
    for _ in pyarrow_with_formats().ipc.open_stream(source):
        pass
    if source.tell() != size - 10 - footer:
        raise OSError("it goes on after the end of its batches; files were joined")


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return where a field of a table of FlatBuffers is; None if the table lacks it. Raises struct.error."""
    fields = table - int(struct.unpack_from("<i", data, table)[0])
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, fields + 4 + 2 * number)[0])
    return table + offset if offset else None


def _followed(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _messages_of(footer: bytes, field: int, end: int) -> list[tuple[int, int, int]]:
    """Return start, and bytes of metadata and body, of dictionaries (field 2) or batches (3) (Arrow, File.fbs: Footer).

    Raises OSError if they do not lie before `end`.
    """
    try:
        at = _field(footer, _followed(footer, 0), field)
        if at is None:
            return []
        vector = _followed(footer, at)
        count = struct.unpack_from("<I", footer, vector)[0]
        found = [struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * number) for number in range(count)]
    except struct.error as error:
        raise OSError(f"its footer is damaged: {error}") from error
    if any(min(one) < 0 or sum(one) > end for one in found):
        raise OSError("its footer names bytes that it does not have")
    return found


def _rows_of(metadata: bytes) -> int:
    """Return the rows of a record batch (Arrow, Message.fbs: Message.header.length)."""
    try:
        message = metadata[8:] if metadata.startswith(b"\xff\xff\xff\xff") else metadata[4:]
        header = _field(message, _followed(message, 0), 2)
        length = None if header is None else _field(message, _followed(message, header), 0)
        return 0 if length is None else int(struct.unpack_from("<q", message, length)[0])
    except struct.error as error:
        raise OSError(f"the metadata of a batch is damaged: {error}") from error


class RangeFile(io.RawIOBase):
    """Python file object for one object, which is read by ranges with the reader's retries, checks and disk cache."""

    def __init__(self, file: SourceFile, reader: ObjectReader) -> None:
        self._file = file
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = offset + base
        return self._position

    def read(self, count: int = -1, /) -> bytes:
        size = self._file.size
        stop = size if count < 0 else min(size, self._position + count)
        (data,) = self._reader.read_many([span_of(self._file, self._position, max(stop, self._position))])
        self._position += len(data)
        return data


class _UnreadFile(RangeFile):
    """A file of which only known metadata is used, so it has no bytes. Arrow would keep an error that `read` raises."""

    is_read = False

    def read(self, count: int = -1, /) -> bytes:
        self.is_read = True
        return b""


def span_of(file: SourceFile, start: int, stop: int) -> ByteRange:
    """Return the range `start` to `stop` of a file, with the file's size and state, which reads compare."""
    return ByteRange(file.url, start, stop, file.size, file.state)


class errors_of:
    """Context manager that converts errors of Arrow and of the disk to a SourceError or StorageError with the URL."""

    # A class, because `contextmanager` would take a tenth of the time of a row.
    __slots__ = ("_file",)

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, DPFlowError):
            return
        if isinstance(error, FileNotFoundError | PermissionError):
            raise storage_error(ByteRange(printable_url(self._file.url)), error) from error
        # Arrow raises OSError for damaged pages, and Python the others for names and values.
        if isinstance(error, pyarrow_with_formats().ArrowException | ValueError | ArithmeticError | LookupError) or (
            type(error) is OSError
        ):
            raise SourceError(f"{printable_url(self._file.url)} cannot be read: {error}") from error


def pyarrow_with_formats() -> Any:
    """Return pyarrow, with its reader of Parquet imported. Raises MissingExtraError if pyarrow is not installed."""
    imported("pyarrow.parquet", "Parquet and Arrow need pyarrow", "datasets")
    return imported("pyarrow", "Parquet and Arrow need pyarrow", "datasets")
