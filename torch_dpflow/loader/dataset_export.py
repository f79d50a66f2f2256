"""Export of any map-style dataset to files of a format such as WebDataset; a loader's workers read the samples."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from types import NoneType
from typing import Any, TypeAlias

import msgspec
import torch
from torch.utils.data import IterableDataset

from torch_dpflow._core.checks import check_flag, check_int, check_type, working
from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.export import (
    MAX_FILE_SIZE,
    Annotations,
    Exported,
    ExportTarget,
    Format,
    checked_settings,
    format_of,
)
from torch_dpflow.datasets.export_formats import ExportSample, FileFormat
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.storage.base import ReadOptions
from torch_dpflow.epoch.rng import preserved_rng, seed_batch
from torch_dpflow.errors import OptionError, OptionTypeError, SourceError
from torch_dpflow.loader.loader import DPFlowDataLoader

#: Function that converts a sample to (bytes, mapping of annotations).
Encode: TypeAlias = Callable[[Any], tuple[bytes, Mapping[str, Any]]]
#: Samples of a task of a worker, and samples by whose mean size files are divided.
_TASK_SAMPLES, _MEASURED = 64, 256


def export_dataset(
    dataset: Any,
    target: str | os.PathLike[str],
    *,
    format: Format = "webdataset",
    encode: Encode | None = None,
    workers: int | None = None,
    name: str = "train",
    main: str | None = None,
    samples_per_file: int | None = None,
    file_size: str = "256MiB",
    row_group_size: str = "16MiB",
    annotations: Annotations = "columns",
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
    write_options: ReadOptions | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> Exported:
    """Write all samples of a map-style dataset, each once and in order, as files that other libraries read.

    Worker processes read the samples; this process writes. The files do not depend on the number of workers. Random
    numbers of the dataset are seeded by sample numbers, so all runs over the same dataset write the same files.
    Each file appears whole or not at all. Memory holds one file, and the samples that workers have loaded ahead.

    Args:
        dataset: its samples are (bytes, mapping of annotations), or `encode` converts them to that.
        target: path or URL of the directory.
        format, main, file_size, row_group_size, annotations, options: as in `torch_dpflow.datasets.export.export`.
        encode: a function of a sample that returns (bytes, mapping of annotations). Workers and this process call it.
        workers: number of processes that read; 0: this process reads. None: one for each processor.
        name: prefix of the files' names.
        samples_per_file: number of samples in each file. None: `file_size`, divided by the mean size of the first 256
            samples.
        resume: whether to keep the files of an earlier run of this export that was killed. The dataset must not have
            changed: only its class, its length and its first samples are compared.
        write_options: timeouts and retries of writing files.
        progress: called after each file, with the number of samples written or kept so far.

    Raises:
        OptionError, OptionTypeError: an option is not allowed; the dataset is empty or has no length; the target has
            other files of these names, or files of an earlier run without `resume=True`.
        SourceError: a sample cannot be read or encoded, or the format cannot store it.
        StorageError: a file cannot be written.
        MissingExtraError: a package that the format or the storage needs is not installed.
    """
    settings = checked_settings(format, main, samples_per_file, file_size, row_group_size, annotations)
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name)):
        raise OptionError(f"name={name!r}: give up to 64 letters, digits, '_' and '-', such as 'train'")
    check_type("encode", encode, (Callable, NoneType), "a function of a sample, or None")
    check_flag("resume", resume)
    check_type("progress", progress, Callable, "a function of a number of samples")
    count = _length_of(dataset)
    processes = len(os.sched_getaffinity(0)) if workers is None else check_int("workers", workers, minimum=0)
    encoded = EncodedSamples(dataset, encode)
    with preserved_rng():  # in this process, so that wrong input fails before anything is written
        first = encoded.__getitems__(range(min(count, _MEASURED)))
    size = sum(len(data) + len(notes) for data, notes in first) // len(first)
    each = settings["samples_per_file"] or max(1, min(settings["file_size"], MAX_FILE_SIZE) // max(1, size))
    kind = format_of(settings, name=type(dataset).__name__)
    plan = [range(start, min(start + each, count)) for start in range(0, count, each)]
    names = [kind.name(name, number, len(plan)) for number in range(len(plan))]
    digest = hashlib.sha256(b"".join(part for sample in first for part in sample)).hexdigest()
    made_from = {
        "dataset": type(dataset).__qualname__,
        "samples": count,
        "first": digest,
        "settings": {**settings, "samples_per_file": each},
        "files": len(names),
    }
    files = Files(target, options, write_options)
    export = ExportTarget(files, name, made_from, names, resumes=resume)
    _write(export, kind, encoded, plan, names, processes, progress)
    return Exported(files.url, names, len(export.present), count)


def _write(
    export: ExportTarget,
    kind: FileFormat,
    encoded: EncodedSamples,
    plan: Sequence[range],
    names: Sequence[str],
    processes: int,
    progress: Callable[[int], None],
) -> None:
    """Write the files that do not exist yet. Raises the errors of `export_dataset`."""
    # The first file decides about columns, so it is read again where it is kept.
    read = [part for part, one in zip(plan, names) if one not in export.present or part is plan[0]]
    with preserved_rng(), closing(_samples(encoded, read, processes)) as samples:
        for part, one in zip(plan, names, strict=True):
            if one not in export.present or part is plan[0]:
                found = [*islice(samples, len(part))]
                _check_size(found)
                _observe(kind, found, is_first=part is plan[0])
                if one not in export.present:
                    export.write(one, kind.content(iter(found)))
            progress(part.stop)


def _samples(encoded: EncodedSamples, parts: Sequence[range], processes: int) -> Generator[ExportSample, None, None]:
    """Yield the samples of these files. A task never spans two files, so files that exist already change no task."""
    tasks = [part[start : start + _TASK_SAMPLES] for part in parts for start in range(0, len(part), _TASK_SAMPLES)]
    loader: DPFlowDataLoader[Any] = DPFlowDataLoader(
        encoded,
        batch_sampler=tasks,  # type: ignore[arg-type]  # not lists, as a million numbers take memory
        num_workers=processes,
        collate_fn=list,
        generator=torch.Generator(),
    )
    for task, batch in zip(tasks, loader, strict=True):
        for number, (data, notes) in zip(task, batch, strict=True):
            yield ExportSample(number, {"": data}, None, notes, f"sample {number}")


def _observe(kind: FileFormat, samples: Sequence[ExportSample], *, is_first: bool) -> None:
    """Record the annotations of a file. Raises SourceError if they do not fit those of the first file."""
    for sample in samples:
        kind.observe(sample.number, msgspec.json.decode(sample.annotations))
    if is_first:
        kind.begin(samples[0])
    elif difference := kind.difference():
        raise SourceError(
            f"samples {samples[0].number} to {samples[-1].number} have {difference}; give an empty directory and "
            "annotations='json', or encode= that returns the same fields and types for all samples"
        )


def _check_size(samples: Sequence[ExportSample]) -> None:
    size = 0
    for sample in samples:
        size += sum(map(len, sample.members.values())) + len(sample.annotations)
        if size > MAX_FILE_SIZE:
            raise SourceError(
                f"samples {samples[0].number} to {sample.number} have more than {MAX_FILE_SIZE} bytes, the most of a "
                "file; give a smaller samples_per_file"
            )


def _length_of(dataset: Any) -> int:
    try:
        count = len(dataset)
    except TypeError:
        count = None
    if count is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise OptionTypeError(
            f"dataset={dataset!r:.80} is of type {type(dataset).__name__}; give a map-style dataset: with __getitem__ "
            "and __len__"
        )
    if not count:
        raise OptionError("the dataset has no samples, and nothing to export")
    return int(count)


class EncodedSamples(torch.utils.data.Dataset[tuple[bytes, bytes]]):
    """Dataset of (bytes, annotations as JSON), seeded by sample numbers. A sample that fails raises SourceError."""

    def __init__(self, dataset: Any, encode: Encode | None) -> None:
        self._dataset, self._encode = dataset, encode

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> tuple[bytes, bytes]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """Return the samples with these numbers, read in one call if the dataset has `__getitems__`."""
        together = working(self._dataset, "__getitems__")
        if together is None:
            return [self._encoded(number, self._read(number)) for number in numbers]
        seed_batch(0, 0, numbers[0])
        try:
            found = [*together([*numbers])]
        except Exception as error:
            raise SourceError(f"samples {numbers[0]} to {numbers[-1]} cannot be read: {_shown(error)}") from error
        if len(found) != len(numbers):
            raise SourceError(f"__getitems__ returned {len(found)} samples for {len(numbers)} numbers")
        return [self._encoded(number, sample) for number, sample in zip(numbers, found)]

    def _read(self, number: int) -> Any:
        seed_batch(0, 0, number)
        try:
            return self._dataset[number]
        except Exception as error:
            raise SourceError(f"sample {number} cannot be read: {_shown(error)}") from error

    def _encoded(self, number: int, sample: Any) -> tuple[bytes, bytes]:
        if self._encode is not None:
            try:
                sample = self._encode(sample)
            except Exception as error:
                raise SourceError(f"sample {number} cannot be encoded: {_shown(error)}") from error
        data, notes = sample if isinstance(sample, tuple) and len(sample) == 2 else (None, None)
        if not isinstance(data, bytes | bytearray | memoryview) or not isinstance(notes, Mapping):
            raise SourceError(
                f"sample {number} is {sample!r:.200}; give encode=, a function of a sample that returns (bytes, "
                "mapping of annotations)"
            )
        return bytes(data), bytes(encode_annotations(notes, f"sample {number}"))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
