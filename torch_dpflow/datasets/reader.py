"""The unified dataset reader (UDR) as torch datasets: one of bytes and annotations, one of decoded samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from torch_dpflow._core.stage_clock import stage
from torch_dpflow.datasets.importers.webdataset import PARTS
from torch_dpflow.datasets.index import Place
from torch_dpflow.datasets.sample_reader import Plan, Sample, SampleReader, SampleTable
from torch_dpflow.datasets.storage import ByteRange
from torch_dpflow.datasets.views import COPYING, Decode, decoder_of, view_of
from torch_dpflow.errors import DamagedStoreError, DPFlowError, SourceError
from torch_dpflow.lookahead import Order, announce_order


class DatasetReader(SampleReader, Dataset[Sample]):
    """A stored dataset as a map-style dataset of `(bytes, annotations)`.

    A metadata shard is read when one of its samples is first read, and kept in a file that all processes of the host
    map (in `DPFLOW_INDEX_DIR`, else in the user's cache directory). The reads of a batch (`__getitems__`, which
    loaders call) overlap. Thread-safe. A forked child opens separate connections and threads; a pickle contains none.

    Args:
        stored: a variant from `DatasetStore.open`.
        storage_options: fsspec's options for the data; None: the store's options.
        read_options: timeouts, retries, concurrency.
        check: which samples to compare with their checksums, if the dataset has any. None: those read from storage.
            True: those from `through` too. False: none, and objects that were written again after their import are
            read without an error. Lengths that are known are always compared.
        on_error: "raise": a batch raises its first error. "skip": unreadable samples are left out of the batch, logged
            (`torch_dpflow.datasets`) and counted; the last error is raised if none is left. A sample that is read alone
            always raises its error.
        through: a source of samples that is nearer than the storage, such as the result of `DataClient.samples`.
            Samples that this source does not have are read from storage.

    Raises:
        OptionError, OptionTypeError: an option is not allowed, or `through` has samples of another dataset.
    """

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Announce the order of an epoch's reads to the source `through`, if any. See `lookahead.announce_order`."""
        if self._through is not None:
            announce_order(self._through, order, spread, extends)


class OpenedDataset(DatasetReader):
    """A `DatasetReader` of samples as dicts (of LitData also other values), or as `decode` returns them.

    `DatasetReader(dataset.stored)` reads the same samples as bytes and annotations.

    Args:
        stored: a variant from `DatasetStore.open`, or an index.
        decode: see `open_dataset`.
        given_urls: URLs to read objects at, by their URLs in `stored`, where the two differ.
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
        self._copies = stored.importer in COPYING
        self._decode = decoder_of(decode)

    def _planned(self, place: Place) -> Plan | DPFlowError:
        plan = super()._planned(place)
        if isinstance(plan, DPFlowError) or PARTS not in plan[1]:
            return plan
        span, fields, parts = plan
        try:
            for name, (at, length) in fields[PARTS].items():
                parts[name] = ByteRange(span.url, at, at + length, span.size, span.state)
            return plan
        except (AttributeError, TypeError, ValueError) as error:
            return DamagedStoreError(f"{span}: {PARTS}={fields[PARTS]!r:.200} are no parts: {error}")

    def _sample(self, plan: Plan, content: bytes, parts: Mapping[str, bytes]) -> Any:
        try:
            with stage("decode"):
                sample = self._view(content, plan[1], parts)
                return sample if self._decode is None else self._decode(sample)
        except SourceError as error:
            return SourceError(f"{plan[0]}: {error}")
