"""OpenedDataset: samples of any format as dicts, or decoded, by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_dpflow._core.stage_clock import stage
from torch_dpflow.datasets.importers.webdataset import PARTS
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.rows import Place
from torch_dpflow.datasets.sample_reader import Plan, SampleTable
from torch_dpflow.datasets.storage import ByteRange
from torch_dpflow.datasets.views import Decode, decoder_of, view_of
from torch_dpflow.errors import DamagedStoreError, DPFlowError, SourceError


class OpenedDataset(DatasetReader):
    """A `DatasetReader` whose samples are dicts, or what `decode` makes of them. See `open_dataset`.

    `stored` is its index; `DatasetReader(dataset.stored)` reads the same samples as bytes and annotations.

    Args:
        stored: a variant from `DatasetStore.open`, or an index.
        decode: see `open_dataset`.
        given_urls: given URLs of objects by their URLs in `stored`, where the two differ.
        reading: further arguments of `DatasetReader`.

    Raises:
        OptionError, OptionTypeError: an option is not allowed.
    """

    def __init__(
        self,
        stored: SampleTable,
        *,
        decode: Decode | None = None,
        given_urls: Mapping[str, str] | None = None,
        **reading: Any,
    ) -> None:
        super().__init__(stored, **reading)
        self._given_urls = dict(given_urls or {})
        self._view = view_of(stored.importer, stored.info)
        self._decode = decoder_of(decode)

    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    def _planned(self, place: Place) -> Plan | DPFlowError:
        plan = super()._planned(place)
        if isinstance(plan, DPFlowError) or PARTS not in plan[1]:
            return plan
        span, fields, _ = plan
        try:
            places = fields[PARTS].items()
            parts = {name: ByteRange(span.url, at, at + size, state=span.state) for name, (at, size) in places}
            return span, fields, parts
        except (AttributeError, TypeError, ValueError) as error:
            return DamagedStoreError(f"{span}: {PARTS}={fields[PARTS]!r:.200} are no parts: {error}")

    def _sample(self, plan: Plan, content: bytes, parts: Mapping[str, bytes]) -> Any:
        try:
            with stage("decode"):
                return self._decode(self._view(content, plan[1], parts))
        except SourceError as error:
            return SourceError(f"{plan[0]}: {error}")
