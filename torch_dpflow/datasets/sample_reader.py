"""The unified dataset reader (UDR) without torch: any sample of a dataset by number (thesis, algorithm 3.1)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch_dpflow._core.checks import check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow._core.stage_clock import stage
from torch_dpflow.datasets.index import Index, Place, Rows
from torch_dpflow.datasets.spec import decode_fields
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import check_storage_options, matches, read_options_of
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import (
    ChecksumError,
    DPFlowError,
    OptionError,
    TruncatedObjectError,
)
from torch_dpflow.log import DATASETS

#: A sample: its bytes as they are in the storage, and its annotations.
Sample = tuple[bytes, dict[str, Any]]
OnError = Literal["raise", "skip"]

#: Datasets that a reader can read.
SampleTable = StoredDataset | Index
#: A sample to read: range, annotations, and ranges of further parts by name.
Plan = tuple[ByteRange, dict[str, Any], dict[str, ByteRange]]
_Content = bytes | memoryview | DPFlowError
#: Attributes that a pickle does not carry.
_OF_PROCESS = ("_skips", "_metadata", "_data", "_rows")


def check_how_to_read(storage_options: object, read_options: object, check: object) -> None:
    """Check the arguments of readers of stored datasets. Raises OptionError, OptionTypeError."""
    check_storage_options(storage_options)
    read_options_of(read_options)
    if check is not None:
        check_type("check", check, bool, "True, False or None")


@runtime_checkable
class Through(Protocol):
    """Interface of a source of a stored dataset's samples that is nearer than its storage, such as a pool.

    The source compares samples with their checksums when it reads storage. Other processes can use its pickle.
    """

    def read(self, numbers: Sequence[int], lengths: Sequence[int | None]) -> Sequence[bytes | None]:
        """Return the bytes of these samples; None for each sample that the source does not have.

        Args:
            lengths: bytes of each sample; None if unknown.
        """

    def is_of(self, stored: SampleTable) -> bool:
        """Return whether the source has samples of this dataset."""

    def close(self) -> None:
        """Close what this process has opened. The source can be used again."""


class SampleReader:
    """Reader of a stored dataset's samples without torch. Arguments and errors are those of `DatasetReader`."""

    #: Whether samples are made of copies of parts of their bytes, so that these can be views.
    _copies = False

    def __init__(
        self,
        stored: SampleTable,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        check: bool | None = None,
        on_error: OnError = "raise",
        through: Through | None = None,
    ) -> None:
        check_type("stored", stored, get_args(SampleTable), "the result of DatasetStore.open")
        check_how_to_read(storage_options, read_options, check)
        if on_error not in get_args(OnError):
            raise OptionError(f"on_error={on_error!r}: give one of {get_args(OnError)}")
        if through is not None:
            check_type("through", through, Through, "the result of DataClient.samples(stored)")
            if not through.is_of(stored):
                raise OptionError(
                    f"through= has samples of a dataset other than {stored.ref}; give DataClient.samples of this one"
                )
        self.stored = stored
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._read_options = read_options_of(read_options)
        self._check = check
        self._on_error = on_error
        self._through = through
        #: Given URLs of objects by their URLs in the metadata, where the two differ
        self._given_urls: dict[str, str] = {}
        self._prepare()
        if isinstance(stored, StoredDataset):
            self._rows  # noqa: B018  # not on first use, so that forked children share them

    def __len__(self) -> int:
        return len(self.stored)

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch, in order. `on_error` decides about samples that cannot be read."""
        samples: list[Sample] = []
        failure: DPFlowError | None = None
        for index, sample in zip(indices, self.read_each(indices), strict=True):
            if not isinstance(sample, DPFlowError):
                samples.append(sample)
                continue
            if self._on_error == "raise":
                raise sample
            failure = sample
            self._skip(index, sample)
        if failure is not None and not samples:
            raise failure
        return samples

    def read(self, index: int) -> Sample:
        """Return sample `index`; a negative one counts from the end.

        Raises:
            IndexError: there is no such sample.
            DatasetError: its metadata, or its copy in an index, is damaged; or its bytes cannot be decoded.
            StorageError: its object cannot be read, or does not match the metadata.
        """
        (sample,) = self.read_each([index])
        if isinstance(sample, DPFlowError):
            raise sample
        return sample

    __getitem__ = read

    def read_each(self, indices: Sequence[int]) -> list[Sample | DPFlowError]:
        """Return each sample, or its error, in the order of `indices`. Raises IndexError for an index out of range."""
        numbers = self._wrapped(indices)
        samples: list[Any] = []
        plans: dict[int, Plan] = {}
        for position, place in enumerate(self._rows.places(numbers, is_checked=self._check is not False)):
            plan = place if isinstance(place, DPFlowError) else self._planned(place)
            samples.append(plan)
            if not isinstance(plan, DPFlowError):
                plans[position] = plan
        spans, near = [], {}
        with stage("read"):
            if self._through is not None and plans:
                lengths = [length_of(plan[0]) for plan in plans.values()]
                near = dict(zip(plans, self._through.read([numbers[position] for position in plans], lengths)))
            for position, plan in plans.items():
                if near.get(position) is None:
                    spans.append(plan[0])
                spans.extend(plan[2].values())
            # In one call, so that neighbouring ranges become one request.
            contents = iter(self._data.read_each(spans, views=self._copies) if spans else ())
        for position, plan in plans.items():
            held = near.get(position)
            # A source has compared samples with their checksums when they came from storage.
            is_checked = held is not None and not self._check
            content = next(contents) if held is None else held
            samples[position] = self._finished(plan, content, is_checked, dict(zip(plan[2], contents)))
        return samples

    def _planned(self, place: Place) -> Plan | DPFlowError:
        """Return the ranges to read for a sample, or its error."""
        span, meta = place
        try:
            return span, decode_fields(meta, span.url), {}
        except DPFlowError as error:
            return error

    def _finished(self, plan: Plan, content: _Content, is_checked: bool, parts: Mapping[str, _Content]) -> Any:
        """Return a sample from its bytes and its other parts, or an error. is_checked: whether to compare checksums."""
        span, error = plan[0], None
        if isinstance(content, DPFlowError):
            error = content
        else:
            length = length_of(span)
            if length is not None and len(content) != length:
                text = f"{span}: the object has {len(content)} bytes, its dataset says {length}"
                kind = TruncatedObjectError if len(content) < length else ChecksumError
                error = kind(
                    f"{text}; it was replaced or cut short: restore it, open it again if it is read in place, or "
                    "publish a new version"
                )
            elif span.checksum is not None and not is_checked and not matches(content, span.checksum):
                error = ChecksumError(f"{span}: the bytes do not match {span.checksum}; the object was altered")
        for part in parts.values():
            error = error or (part if isinstance(part, DPFlowError) else None)
        if error is not None:
            return self.stored.lost(span, error) if isinstance(self.stored, Index) else error
        return self._sample(plan, content, parts)  # type: ignore[arg-type]

    def _sample(self, plan: Plan, content: bytes, parts: Mapping[str, bytes]) -> Any:
        """Return a sample from its bytes and the bytes of its other parts, or its error."""
        return content, plan[1]

    @property
    def skipped(self) -> dict[str, int]:
        """The number of samples that this process has left out (on_error="skip"), by the name of the error's class."""
        return dict(Counter(self._skips.get()))

    def _skip(self, index: int, error: DPFlowError) -> None:
        self._skips.get().append(type(error).__name__)
        # As text, because a handler that keeps records would keep the frames of the error alive.
        DATASETS.warning("%s, sample %d is left out: %s: %s", self.stored.ref, index, type(error).__name__, str(error))

    def close(self) -> None:
        """Close this process's connections, mapped rows and threads, and `through`. The reader can be used again."""
        vars(self).pop("_rows", None)
        if self._through is not None:
            self._through.close()
        self._data.close()
        self._metadata.close()

    def _wrapped(self, indices: Sequence[int]) -> list[int]:
        count, numbers = len(self.stored), []
        for index in indices:
            number = operator.index(index)
            if not -count <= number < count:
                raise IndexError(f"sample {number} is out of range; {self.stored.ref} has {count} samples")
            numbers.append(number % count)
        return numbers

    def _prepare(self) -> None:
        self._skips = PerProcess(list[str])
        self._metadata = ObjectReader(self.stored.options, options=self._read_options)
        is_same = self._storage_options is None or self._storage_options == self.stored.options
        self._data = self._metadata if is_same else ObjectReader(self._storage_options, options=self._read_options)

    @cached_property
    def _rows(self) -> Rows:
        return self.stored.open_rows(self._metadata, self._given_urls)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}
        options = self._storage_options
        return {**state, "_storage_options": None if options is None else options_to_pickle(options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stored.ref}, {len(self)} samples)"


def length_of(span: ByteRange) -> int | None:
    """Return the length of the sample with the range `span`, bytes; None if unknown."""
    return span.size if span.stop is None else span.stop - span.start
