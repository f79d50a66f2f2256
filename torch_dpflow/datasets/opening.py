"""open_dataset, which opens data in place as a map-style dataset."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, get_args

from torch.utils.data import DataLoader

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.importers import importer_class
from torch_dpflow.datasets.importers.base import check_not_compressed
from torch_dpflow.datasets.importers.packed import LitDataImporter
from torch_dpflow.datasets.importers.shards import ShardImporter
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles, find_sources
from torch_dpflow.datasets.importers.splits import check_no_split_folders
from torch_dpflow.datasets.index import index_directory
from torch_dpflow.datasets.index_builder import open_index
from torch_dpflow.datasets.reader import OpenedDataset
from torch_dpflow.datasets.spec import ID_PATTERN
from torch_dpflow.datasets.storage.base import ChecksumAlgorithm, read_options_of
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.datasets.table_files import are_tables
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.datasets.views import Decode, decoder_of
from torch_dpflow.datasets.writer import ProgressCallback
from torch_dpflow.errors import OptionError, OptionTypeError, SourceError

#: Formats whose samples an importer describes in an index.
_INDEXED = ("imagefolder", "litdata", "mds", "tfrecord", "webdataset")
#: All formats. Tables need no index.
FORMATS = (*_INDEXED, "table")
#: Further arguments of `open_dataset`.
_READING = ("read_options", "check", "on_error", "through")


def open_dataset(
    source: Source,
    *,
    format: str | None = None,
    split: str | None = None,
    decode: Decode | None = None,
    store: DatasetStore | str | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    checksum: ChecksumAlgorithm | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
    **reading: Any,
) -> OpenedDataset | TableDataset:
    """Open data in place, as a map-style dataset that can be read in any order.

    Samples are not copied, except compressed ones of MDS and LitData, which are decompressed into the index.

    For formats other than tables, an index of the samples' positions is built when a source is first opened. Later only
    new and rewritten objects are indexed (an image folder counts as one), and objects whose storage reports no state,
    such as an ETag or a modification time. Processes that open the same source share the work.

    Args:
        source: a path or URL of an object or a directory; `{000..146}` and `{a,b}` are expanded, `*`, `?` and `[…]`
            match names. Or a list of objects and patterns; the samples of an object named twice occur twice. A local
            path that exists and a `pathlib.Path` are never patterns. Or the name of a stored dataset, such as
            "core/pets:v1:train".
        format: one of `FORMATS`; None: detected by names, or else by the first bytes.
        split: the split to read if the directory has several, such as "train". Splits are found by names of files, or
            of directories.
        decode: None: encoded values, such as images, stay bytes. "pil", "rgb", "torch": images become RGB images of
            Pillow, uint8 arrays of shape (height, width, 3), or uint8 tensors of shape (3, height, width); numbers,
            texts, JSON, npy and npz are decoded too, and audio, video, pickles and MessagePack are an error. A function
            is called with each sample that None would give, mostly a dict, and returns the sample.
        store: the store, or its URL, of a dataset that `source` gives by name; None: `DPFLOW_STORE`.
        index_dir: a directory for indexes, a path or a URL; None: `DPFLOW_INDEX_DIR`, else `torch_dpflow/index` in the
            user's cache directory. Workers on other hosts have to be able to read it.
        storage_options: fsspec's options for the source.
        checksum: "crc32" or "sha256": give samples a checksum, which reads compare. All data is read to index it.
            Samples of TFRecord always have a CRC-32 instead. Not for tables.
        settings: further arguments of the format's importer, such as `main` of webdataset, or of `TableDataset`.
        progress: called with the number of samples indexed so far; None: a line on a terminal.
        reading: `read_options`, `check`, `on_error` and `through` of `DatasetReader`; for a table only `read_options`.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed; the format is not recognised; there is no such split.
        SourceError: an object is missing, damaged, cut short, or in a different format; a directory has several splits,
            and none is chosen.
        DatasetNotFoundError, DamagedStoreError, NewerFormatError: the stored dataset does not exist or is unreadable.
        StorageError: the storage cannot be read, or the index cannot be written.
        MissingExtraError: a package that the format or the storage needs is not installed.
    """
    _check_arguments(reading)
    if checksum is not None and checksum not in get_args(ChecksumAlgorithm):
        raise OptionError(f"checksum={checksum!r:.80}: give one of {get_args(ChecksumAlgorithm)}, or None")
    check_type("progress", progress, (Callable, NoneType), "a function of a number of samples, or None")
    decoder_of(decode)  # before an index is built
    if store is not None or _is_stored(source):
        if format is not None or settings or split is not None:
            raise OptionError(
                f"format={format!r}, settings={settings!r}, split={split!r} are not for stored datasets; leave them out"
            )
        if not isinstance(source, str):
            raise OptionError(f"source={source!r:.80} with store=: give the name of one stored dataset")
        return OpenedDataset(_store(store).open(source), decode=decode, storage_options=storage_options, **reading)
    if settings is not None:
        check_type("settings", settings, Mapping, "a mapping of names")
    check_type("split", split, (str, type(None)), "a name, such as 'train', or None")
    files = find_sources(source, storage_options, read_options_of(reading.get("read_options")))
    below = None if split is None else files.of_folder(split)
    files, split = (files, split) if below is None else (below, None)
    if format is not None and format not in FORMATS:
        raise OptionError(f"format={format!r}: give one of {', '.join(FORMATS)}, or None to find it")
    name = format or found_format(files)
    settings = {**(settings or {}), **({} if split is None else {"split": split})}
    if name == "table":
        return _table(TableDataset, files, files.given, decode, checksum, {**settings, **reading})
    if split is not None and not getattr(importer_class(name), "has_splits", False):
        raise OptionError(f"split={split!r}: {files.given} has no directory of that name; it has {files.folders}")
    if name == "imagefolder":
        _check_apart(files, index_dir)
    chunks = _importer(name, files, {}) if name == "litdata" else None
    if chunks is not None and chunks.has_rows:
        return _table(LitRows, chunks, files.given, decode, checksum, {**settings, **reading})
    importer = _importer(name, files, settings) if chunks is None or settings else chunks
    importer.is_in_place = True
    if isinstance(importer, ShardImporter):
        # Checksums are computed later, and the cache finds samples by them.
        importer.fills_cache = checksum is None
    index = open_index(index_dir, importer, checksum, progress)
    return OpenedDataset(index, decode=decode, storage_options=files.options, given_urls=files.given_urls(), **reading)


def _check_arguments(reading: Mapping[str, Any]) -> None:
    """Raise OptionTypeError for unknown arguments of `open_dataset`, with advice for arguments of loaders."""
    unknown = [name for name in reading if name not in _READING]
    if not unknown:
        return
    given = ", ".join(f"{name}={reading[name]!r:.80}" for name in unknown)
    if all(name in inspect.signature(DataLoader).parameters for name in unknown):
        raise OptionTypeError(
            f"open_dataset() has no {given}; give it to the loader: DPFlowDataLoader(dataset, {given})"
        )
    own = [name for name in inspect.signature(open_dataset).parameters if name != "reading"]
    raise OptionTypeError(
        f"open_dataset() has no {given}; give {', '.join([*own, *_READING])}, and arguments of the format in settings="
    )


def found_format(files: SourceFiles) -> str:
    """Return the name of the objects' format, found by their names, or else by the first bytes of one object.

    Raises:
        OptionError: no format fits, or more than one; or a list or pattern mixes files of a format and others.
        SourceError: no format fits, and the object is compressed, or the directory has folders of several splits.
    """
    kinds = {name: importer_class(name) for name in _INDEXED}
    found = [name for name, kind in kinds.items() if kind.finds(files)]
    found += ["table"] if are_tables(files.names) else []
    if not found and files.files:
        _check_endings(files, [kind.names for kind in kinds.values() if hasattr(kind, "names")])
        # Writers of shards leave empty ones, and empty files as markers.
        named = enumerate(zip(files.names, files.files, strict=True))
        number = next((number for number, (name, file) in named if "." not in name and file.size), 0)
        head = files.head(number)
        found = [name for name, kind in kinds.items() if hasattr(kind, "begins") and kind.begins(head)]
        if not found:
            check_not_compressed(head, files.files[number].printable)
    if len(found) == 1:
        return found[0]
    if not found:
        check_no_split_folders(files.folders, files.given)
    what = f"may be {' or '.join(found)}" if found else "has no format that is known"
    folders = f", but the directory {files.folders[0]!r}" if files.folders else ""
    names = ", ".join(files.names[:3]) or f"no files{folders}"
    raise OptionError(f"{files.given} ({names}) {what}; give format=, one of {', '.join(FORMATS)}")


def _check_endings(files: SourceFiles, formats: Sequence[re.Pattern[str]]) -> None:
    """Raise OptionError if a list or pattern names files with a format's extension and other files, such as backups."""
    named = {name: any(one.fullmatch(name) for one in formats) for name in files.names}
    known = next((name for name, is_known in named.items() if is_known and "." in name), None)
    other = next((name for name, is_known in named.items() if not is_known), None)
    if known is not None and other is not None and not files.is_directory:
        raise OptionError(
            f"{files.given} names {known!r}, and {other!r} with another ending, as backups and partial files have; "
            "give a narrower pattern or list, or format="
        )


def _table(
    kind: Callable[..., TableDataset],
    source: Any,
    given: str,
    decode: Decode | None,
    checksum: Any,
    how: dict[str, Any],
) -> TableDataset:
    if checksum is not None:
        raise OptionError(f"checksum={checksum!r} is not for tables, which are not copied into an index; leave it out")
    unknown = sorted(how.keys() - {"read_options", "columns", "memory", "split"})
    if unknown:
        raise OptionError(
            f"{given} is a table, which has no {unknown}; give read_options=, and in settings= columns and memory"
        )
    return kind(source, decode=decoder_of(decode), **how)


class LitRows(TableDataset):
    """Map-style dataset of the rows of a LitData directory whose chunks have rows in Arrow's format, in index order.

    Without `decode`, a sample is the dict that LitData returns, with the columns and types of its chunk.

    Args:
        dataset: the importer of the directory.
        how: further arguments of `TableDataset`.

    Raises SourceError: a chunk has more or fewer rows than the index lists; and the errors of `TableDataset`.
    """

    def __init__(self, dataset: LitDataImporter, **how: Any) -> None:
        self._listed = dataset
        super().__init__(dataset.files, **how)
        del self._listed

    def _find_files(self, found: SourceFiles, split: str | None) -> list[SourceFile]:
        return found.files

    def _count_blocks(self) -> list[list[int]]:
        counts = super()._count_blocks()
        for file, of_file in zip(self._files, counts, strict=True):
            listed = self._listed.samples_of(file)
            if sum(of_file) != listed:
                raise SourceError(
                    f"{file.printable} has {sum(of_file)} rows, and the index says {listed}; it was cut or replaced"
                )
        return counts

    def _joined_schema(self, schemas: Mapping[Any, SourceFile]) -> Any:
        return None  # a chunk may lack columns that no row of it has


def _check_apart(files: SourceFiles, index_dir: str | os.PathLike[str] | None) -> None:
    """Raise OptionError if the index would lie among the images, where its directories would become classes."""
    folder = index_directory() if index_dir is None else os.fspath(index_dir)
    folder = folder if "://" in folder else f"file://{os.path.realpath(os.path.expanduser(folder))}"
    given = files.given
    if given.startswith("file://"):
        given = f"file://{os.path.realpath(given.removeprefix('file://'))}"
    if f"{folder.rstrip('/')}/".startswith(f"{given.rstrip('/')}/"):
        raise OptionError(f"index_dir={folder} is in the image folder {given}; give a directory outside of it")


def _importer(name: str, files: SourceFiles, settings: Mapping[str, Any]) -> Any:
    kind = importer_class(name)
    if name == "imagefolder" and not files.is_directory:
        raise SourceError(f"{files.given} is no directory; give one that has a directory for each class")
    source = files.given if name == "imagefolder" else files
    try:
        return kind(source, options=files.options, **settings)
    except TypeError as error:
        raise OptionError(f"settings={dict(settings)!r:.200}: {error}; see the importer {name}") from error


def _is_stored(source: Source) -> bool:
    """Return whether a source is the name of a stored dataset with its version, and not a path."""
    if not isinstance(source, str) or not re.match(ID_PATTERN, source.partition(":")[0]):
        return False
    return ":" in source and "://" not in source and not os.path.exists(source)


def _store(store: DatasetStore | str | None) -> DatasetStore:
    if isinstance(store, DatasetStore):
        return store
    url = os.environ.get("DPFLOW_STORE") if store is None else store
    if not url:
        raise OptionError("a stored dataset needs its store; give store=, or set DPFLOW_STORE")
    return DatasetStore(url)
