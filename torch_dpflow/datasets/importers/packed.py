"""Importers of MosaicML's MDS and of LitData: shards with a table of offsets, and an `index.json` that lists them."""

from __future__ import annotations

import itertools
import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torch_dpflow._core.checks import load_json
from torch_dpflow._core.lazy import imported
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.columns import lit_decoder, mds_decoder
from torch_dpflow.datasets.importers.shards import ForwardReader, ShardImporter
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles, files_in, find_sources
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.table_blocks import ROWS_MARK, rows_in_chunk
from torch_dpflow.errors import SourceError

_INDEX = "index.json"
#: Names of compressions here, and Arrow's.
_COMPRESSIONS = {"gz": "gzip", "bz2": "bz2", "zstd": "zstd", "br": "brotli"}
#: How a LitData chunk with frames of zstd begins.
_FRAMES = b"LDFZ01\0\0"
#: Formats in the index of a dataset whose chunks can have rows in Arrow's format. They describe only chunks without
#: such rows; "pickle" is the format of None.
_IN_ROWS = frozenset({"bool", "bytes", "float", "int", "json", "pickle", "str", "string", "text"})
#: Bytes of an index; that of 100,000 shards has about 60 MB.
_MAX_INDEX = 256 << 20


class PackedShard(NamedTuple):
    """One shard's entry in the index."""

    name: str
    #: bytes of the file; None: not in the index
    size: int | None
    samples: int
    #: compression of the whole file
    compression: str | None
    #: whether each sample is compressed by itself, with zstd
    has_compressed_samples: bool = False
    #: name and bytes of the decompressed file, by which the library's own reader replaces a local compressed one
    unpacked: tuple[str, int] | None = None

    def as_present(self, present: Collection[str]) -> PackedShard:
        """Return the entry of the decompressed file if `present`, the names of the files, has only this one."""
        if self.unpacked is None or self.name in present or self.unpacked[0] not in present:
            return self
        name, size = self.unpacked
        return self._replace(name=name, size=size, compression=None, unpacked=None)


class PackedImporter(ShardImporter):
    """Base of importers of a directory with an `index.json`.

    Samples are read in place. If the shards or the samples are compressed, they are decompressed and copied.

    Args:
        source: the directory.
        options: fsspec's options for the directory.

    Raises:
        OptionError, OptionTypeError: the source is malformed.
        SourceError: the source is not a directory of this format, or its index is damaged, or contains values that
            cannot be read.
    """

    has_splits = False

    def __init__(self, source: Source | SourceFiles, *, options: Mapping[str, Any] | None = None) -> None:
        files = source if isinstance(source, SourceFiles) else find_sources(source, options)
        index = next((file for file in files.files if file.url.endswith(f"/{_INDEX}")), None)
        if not files.is_directory or index is None:
            raise SourceError(f"{files.given} is no directory with an {_INDEX}; give that of a {self.name} dataset")
        try:
            self.shards, self._info = self._read_index(_json_of(index, files))
            _check_once(
                [shard.name for shard in self.shards],
                "; list each shard once. To repeat samples, use torch.utils.data.ConcatDataset",
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SourceError(
                f"{index.printable} is no index of {self.name}: {type(error).__name__}: {error}"
            ) from error
        present = dict(zip(files.names, files.files, strict=True)) | self._below(files)
        self.shards = [shard.as_present(present) for shard in self.shards]
        for shard in self.shards:
            _check_present(files.given, shard, present.get(shard.name))
        self._by_url = {present[shard.name].url: shard for shard in self.shards}
        super().__init__(files.of([present[shard.name] for shard in self.shards]))
        self.may_copy = any(shard.compression or shard.has_compressed_samples for shard in self.shards)

    @classmethod
    def finds(cls, files: SourceFiles) -> bool:
        """Return whether a directory has an `index.json`, and shards of this format in it or its first subdirectory."""
        if not files.is_directory or _INDEX not in files.names:
            return False
        if not any(map(cls.names.fullmatch, files.names)) and files.folders:
            children = Files(files.given, files.options, files.read_options).children(files.folders[0])
            return any(cls.names.fullmatch(child.name) for child in children)
        return any(map(cls.names.fullmatch, files.names))

    def _below(self, files: SourceFiles) -> dict[str, SourceFile]:
        """Return the objects in directories that the index of a merged dataset names, by path."""
        folders: dict[str, None] = {}
        for shard in self.shards:
            folder, slash, _ = shard.name.rpartition("/")
            if slash:
                if any(part in ("", ".", "..") for part in shard.name.split("/")):
                    raise SourceError(f"{files.given}: the index lists {shard.name!r}; give names below the directory")
                folders[folder] = None
        return {path: file for folder in folders for path, file in files_in(files, folder)}

    @abstractmethod
    def _read_index(self, index: Any) -> tuple[list[PackedShard], dict[str, Any]]:
        """Return the shards, and the information that views of samples need. Raises KeyError, TypeError, ValueError."""

    def info(self) -> Mapping[str, Any]:
        return {**self._info, **super().info()}

    def settings(self) -> Mapping[str, Any]:
        return self._info

    def objects(self) -> list[tuple[Any, ...]]:
        return [(*one, *self._by_url[file.url][2:5]) for one, file in zip(super().objects(), self.files.files)]

    def total(self) -> int | None:
        return sum(shard.samples for shard in self.shards)

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        shard = self._by_url[file.url]
        size = data.size
        if shard.compression is not None:
            content = _decompressed(data.at(0, size), shard.compression, file.printable)
            size, data = len(content), ForwardReader(lambda start, stop: content[start:stop], len(content), 1 << 20, 0)
        offsets = _offsets(data, shard, file.printable)
        if offsets[-1] != size:
            self._check_rest(data, offsets, file.printable)
        for start, stop in itertools.pairwise(offsets):
            if shard.has_compressed_samples:
                yield Item(data=_decompressed(data.at(start, stop - start), "zstd", file.printable))
            elif shard.compression is not None:
                yield Item(data=data.at(start, stop - start))
            else:
                path = self.files.path_of(file)
                yield Item(path=path, offset=start, length=stop - start, revision=file.state)

    def _check_rest(self, data: ForwardReader, offsets: list[int], url: str) -> None:
        """Raise SourceError if bytes follow the last sample that are not a repetition of the samples."""
        raise SourceError(f"{url} has offsets that are not those of {data.size} bytes; it is damaged")


class MDSImporter(PackedImporter):
    """Importer of a directory of MosaicML Streaming (MDS), read in place.

    `open_dataset` returns a sample as MDS does, a dict of its columns' values, except that encoded images are bytes.
    Columns of pickles, among others, raise SourceError.
    """

    name = "mds"
    names = re.compile(r".*\.mds(\.\w+)?", re.IGNORECASE | re.DOTALL)

    def _read_index(self, index: Any) -> tuple[list[PackedShard], dict[str, Any]]:
        shards: list[PackedShard] = []
        columns: list[list[Any]] | None = None
        for entry in index["shards"]:
            if entry["format"] != "mds" or entry["version"] != 2:
                raise ValueError(f"a shard has the format {entry['format']!r}, version {entry['version']!r}")
            names, encodings, sizes = (entry[f"column_{part}"] for part in ("names", "encodings", "sizes"))
            found = [list(column) for column in zip(names, encodings, sizes, strict=True)]
            if columns is not None and found != columns:
                raise ValueError("its shards have different columns")
            columns = found
            raw, packed = entry["raw_data"], entry["raw_data"] if entry["compression"] is None else entry["zip_data"]
            compression = None if entry["compression"] is None else entry["compression"].partition(":")[0]
            shard = PackedShard(packed["basename"], packed["bytes"], entry["samples"], compression)
            shards.append(shard if compression is None else shard._replace(unpacked=(raw["basename"], raw["bytes"])))
        _check_once([name for name, _, _ in columns or []])
        for name, encoding, size in columns or []:
            if not isinstance(name, str) or not (size is None or isinstance(size, int)):
                raise ValueError(f"it has a column {name!r} of size {size!r}")
            _check_column(name, lambda encoding=encoding: mds_decoder(encoding))
        return shards, {"columns": columns or []}


class LitDataImporter(PackedImporter):
    """Importer of a directory of LitData, read in place.

    `open_dataset` returns a sample as LitData does, except that encoded images are bytes. If chunks have rows in
    Arrow's format (`has_rows`), `LitRows` reads them. Raises SourceError, among others, for

    - pickled values,
    - encrypted chunks, and chunks for item loaders other than `PyTreeLoader`,
    - chunks written with compression_level="batch", whose compressed frames hold several samples (`scan` finds them).
    """

    name = "litdata"
    names = re.compile(r"chunk-.*\.bin", re.DOTALL)

    def __init__(self, source: Source | SourceFiles, *, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(source, options=options)
        #: Whether the first chunk has rows in Arrow's format, and no samples before them.
        self.has_rows = self._begins_with_rows()
        if not self.has_rows:
            for number, name in enumerate(self._info["formats"]):
                _check_column(f"number {number} of {self.files.given}", partial(lit_decoder, name))

    def _read_index(self, index: Any) -> tuple[list[PackedShard], dict[str, Any]]:
        config = index["config"]
        loader, encryption = config.get("item_loader") or "PyTreeLoader", config.get("encryption")
        if loader != "PyTreeLoader" or encryption is not None:
            raise ValueError(f"it is for the loader {loader}, with encryption {encryption}, which is not read")
        # LitData compresses whole files ("chunk"), samples, or frames of several, whose files show it.
        level = config.get("compression_level") or "chunk"
        if level not in ("chunk", "batch", "sample"):
            raise ValueError(f"it has the compression_level {level!r}")
        packed = (config.get("compression") or "").partition(":")[0] or None
        whole = packed if level == "chunk" else None
        shards = [
            PackedShard(
                chunk["filename"],
                None if whole else chunk["chunk_bytes"],
                chunk["chunk_size"],
                whole,
                level == "sample",
                (chunk["filename"].replace(f".{whole}", ""), chunk["chunk_bytes"]) if whole else None,
            )
            for chunk in index["chunks"]
        ]
        formats = list(config["data_format"])
        version, tree = json.loads(config["data_spec"])
        if version != 1:
            raise ValueError(f"its data_spec has version {version}")
        spec = _spec(tree)
        if _leaves(spec) != len(formats):
            raise ValueError(f"its data_spec has {_leaves(spec)} values, and data_format {len(formats)}")
        return shards, {"formats": formats, "spec": spec}

    def samples_of(self, file: SourceFile) -> int:
        """Return the number of samples that the index lists for a chunk."""
        return self._by_url[file.url].samples

    def _begins_with_rows(self) -> bool:
        if not {*self._info["formats"]} <= _IN_ROWS:
            return False
        file = self.files.files[0]
        count = self.samples_of(file)
        end = 4 * (count + 2)
        if not count or end > file.size:
            return False
        first, last = _read(
            self.files, *[ByteRange(file.url, at, at + 4, file.size, file.state) for at in (4, end - 4)]
        )
        return int.from_bytes(first, "little") == int.from_bytes(last, "little") == end

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        if data.at(0, len(_FRAMES)) == _FRAMES:
            raise SourceError(
                f"{file.printable} has frames of zstd, whose samples cannot be read one by one; write it with "
                "compression_level='sample' or 'chunk'"
            )
        return super().scan(file, data)

    def _check_rest(self, data: ForwardReader, offsets: list[int], url: str) -> None:
        if rows_in_chunk(data.at(data.size - ROWS_MARK, ROWS_MARK), data.size) != (offsets[-1], data.size - ROWS_MARK):
            super()._check_rest(data, offsets, url)
        if offsets[0] == offsets[-1]:
            raise SourceError(
                f"{url} has rows in Arrow's format, which cannot be stored one by one; open_dataset reads its "
                "directory, and export_dataset then writes Parquet"
            )


def _spec(node: Any) -> Any:
    """Return the nesting of values, as the argument `spec` of `lit_sample`."""
    kind, children = node["type"], [_spec(child) for child in node["children_spec"]]
    if kind is None:
        return "*"
    if kind == "builtins.list":
        return children
    if kind == "builtins.tuple":
        return {"tuple": children}
    if kind == "builtins.dict":
        # As pairs: a store does not keep the order of names.
        names = json.loads(node["context"])
        _check_once(names)
        return {"dict": [list(pair) for pair in zip(names, children, strict=True)]}
    raise ValueError(f"its samples are of {kind}, which is not read")


def _leaves(spec: Any) -> int:
    if spec == "*":
        return 1
    children = spec if isinstance(spec, list) else spec.get("tuple") or [child for _, child in spec.get("dict", [])]
    return sum(map(_leaves, children))


def _check_once(names: list[Any], advice: str = "") -> None:
    """Raise ValueError if two values or shards have the same name: a dict would keep only the last."""
    if len({*names}) < len(names):
        raise ValueError(f"it has {Counter(names).most_common(1)[0][0]!r} twice{advice}")


def _check_column(name: str, decoder: Any) -> None:
    try:
        decoder()
    except SourceError as error:
        raise SourceError(f"the column {name} cannot be read: {error}") from error


def _json_of(file: SourceFile, files: SourceFiles) -> Any:
    if file.size > _MAX_INDEX:
        raise SourceError(f"{file.printable} has {file.size} bytes; at most {_MAX_INDEX} are read")
    (data,) = _read(files, ByteRange(file.url, size=file.size, state=file.state))
    return load_json(data)


def _read(files: SourceFiles, *spans: ByteRange) -> list[bytes]:
    with ObjectReader(files.options, options=files.read_options) as reader:
        return reader.read_many(spans)


def _check_present(given: str, shard: PackedShard, file: SourceFile | None) -> None:
    if not isinstance(shard.samples, int) or shard.samples < 0:
        raise SourceError(f"{given}: the index lists {shard.name} with {shard.samples!r} samples")
    if file is None:
        raise SourceError(f"{given}: the index lists {shard.name}, which is not there; restore it")
    if shard.size is not None and file.size != shard.size:
        raise SourceError(
            f"{file.printable} has {file.size} bytes, and the index says {shard.size}; it was cut or replaced"
        )


def _offsets(data: ForwardReader, shard: PackedShard, url: str) -> list[int]:
    """Return the offset of each sample, and the end of the last one. Raises SourceError if the table is damaged."""
    head = data.at(0, 4 * (shard.samples + 2))
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4").astype(np.int64)
    if len(numbers) != shard.samples + 2 or numbers[0] != shard.samples:
        found = int(numbers[0]) if len(numbers) else 0
        raise SourceError(f"{url} has {found} samples, and the index says {shard.samples}; it was cut or replaced")
    offsets = numbers[1:]
    if offsets[0] < len(head) or offsets[-1] > data.size or (np.diff(offsets) < 0).any():
        raise SourceError(f"{url} has offsets that are not those of {data.size} bytes; it is damaged")
    return [int(offset) for offset in offsets]


def _decompressed(data: bytes, compression: str, url: str) -> bytes:
    """Decompress data.

    Raises:
        SourceError: the data is damaged, or its compression is not known.
        MissingExtraError: pyarrow is not installed.
    """
    if compression == "snappy":
        import snappy

        try:
            return bytes(snappy.decompress(data))
        except Exception as error:  # of classes that differ between versions
            raise SourceError(f"{url} cannot be decompressed: {error}") from error
    if compression not in _COMPRESSIONS:
        raise SourceError(f"{url} has the compression {compression!r}, which is not read")
    pyarrow = imported("pyarrow", "compressed shards need pyarrow", "datasets")
    try:
        stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), _COMPRESSIONS[compression])
        return bytes(stream.read())
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"{url} cannot be decompressed: {error}") from error
