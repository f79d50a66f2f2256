"""OpenedDataset: samples of any format as dicts, or decoded, by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch_dpflow.datasets.importers.webdataset import PARTS
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.sample_reader import Described
from torch_dpflow.datasets.storage import ByteRange
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.datasets.views import Decode, decoder_of, view_of
from torch_dpflow.errors import DamagedStoreError, DPFlowError, SourceError


class OpenedDataset(DatasetReader):
    """A `DatasetReader` whose samples are dicts, or what `decode` makes of them. See `open_dataset`.

    `stored` is its index; `DatasetReader(dataset.stored)` reads the same samples as bytes and annotations.

    Args:
        stored: a variant from `DatasetStore.open`.
        decode: see `open_dataset`.
        given_urls: given URLs of objects by their URLs in `stored`, where the two differ.
        is_index: whether `stored` can be built again, as an index is. A damaged one is removed once this is noticed.
        reading: further arguments of `DatasetReader`.

    Raises:
        OptionError, OptionTypeError: an option is not allowed.
    """

    def __init__(
        self,
        stored: StoredDataset,
        *,
        decode: Decode | None = None,
        given_urls: Mapping[str, str] | None = None,
        is_index: bool = False,
        **reading: Any,
    ) -> None:
        super().__init__(stored, **reading)
        self._given_urls = dict(given_urls or {})
        self._is_index = is_index
        self._view = view_of(stored.variant.source.get("importer"), stored.variant.info)
        self._decode = decoder_of(decode)

    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        """Return each sample, or its error. Raises IndexError, and what a function given as `decode` raises."""
        opened = self._opened.get()
        numbers = self._wrapped(indices)
        described = [self._with_parts(what) for what in self._describe(opened, numbers)]
        wanted = [(number, *what) for number, what in zip(numbers, described) if not isinstance(what, DPFlowError)]
        mains = [(number, what.span) for number, what, _ in wanted]
        spans = [span for _, _, parts in wanted for span in parts.values()]
        if self._through is None:  # in one call, so that neighbouring ranges become one request
            contents = opened.data.read_each([*(span for _, span in mains), *spans])
            found = [(content, False) for content in contents[: len(mains)]]
            rest = iter(contents[len(mains) :])
        else:
            found = self._contents(opened.data, mains)
            rest = iter(opened.data.read_each(spans))
        finished = iter(
            [self._sample(what, *one, dict(zip(parts, rest))) for (_, what, parts), one in zip(wanted, found)]
        )
        return [what if isinstance(what, DPFlowError) else next(finished) for what in described]

    def _with_parts(self, what: Described | DPFlowError) -> tuple[Described, dict[str, ByteRange]] | DPFlowError:
        """Return a sample with the places of its further parts, or its error."""
        try:
            if isinstance(what, Described):
                return what, _parts(what)
        except DamagedStoreError as error:
            what = error
        return self._removed(what) if self._is_index and isinstance(what, DamagedStoreError) else what

    def _removed(self, error: DamagedStoreError) -> DamagedStoreError:
        """Remove the file of the index, so that the next opening builds it again; and return the error that says so."""
        with suppress(OSError, DPFlowError):  # another process has removed it, or may not
            self.stored.files.remove(f"versions/{self.stored.dataset.version}.json")
        return DamagedStoreError(f"{error}. It is a part of an index; open the data again, which builds it anew")

    def _sample(
        self, what: Described, content: bytes | DPFlowError, is_checked: bool, parts: dict[str, bytes | DPFlowError]
    ) -> Any:
        sample = what.sample(content, is_checked)
        if isinstance(sample, DPFlowError):
            return sample
        for part in parts.values():
            if isinstance(part, DPFlowError):
                return part
        try:
            return self._decode(self._view(*sample, parts))  # type: ignore[arg-type]
        except SourceError as error:
            return SourceError(f"{what.span}: {error}")


def _parts(what: Described) -> dict[str, ByteRange]:
    """Return the ranges of a sample's further parts, which are in its object."""
    places = what.fields.get(PARTS)
    if places is None:
        return {}
    try:
        return {
            name: ByteRange(
                what.span.url,
                start,
                start + length,
                state=what.span.state,
            )
            for name, (start, length) in places.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedStoreError(f"{what.span}: {PARTS}={places!r:.200} are no parts: {error}") from error
