"""UDR, the unified dataset reader, as a torch dataset."""

from __future__ import annotations

from torch.utils.data import Dataset

from torch_dpflow.datasets.sample_reader import Sample, SampleReader
from torch_dpflow.lookahead import Order, announce_order


class DatasetReader(SampleReader, Dataset[Sample]):
    """A stored dataset as a map-style dataset of `(bytes, annotations)`.

    A metadata shard is read when one of its samples is first read, and kept as rows in a file that all processes of the
    host map (`DPFLOW_INDEX_DIR`, else `~/.cache/torch_dpflow/index`). The reads of a batch (`__getitems__`, as loaders
    call it) overlap. Thread-safe. A forked child opens its own connections and threads; a pickle carries none of them.

    Args:
        stored: a variant from `DatasetStore.open`.
        storage_options: fsspec's options for the data; None: the store's options.
        read_options: timeouts, retries, concurrency.
        check: whether to compare each sample with its checksum, if the dataset has one. None: only samples that come
            from storage, as `through` has compared its own. False: no sample; objects of S3 and OSS that were written
            again after their import are read too. Lengths are always compared.
        on_error: "skip" leaves samples that cannot be read out of a batch, logs them (`torch_dpflow.datasets`) and
            counts them. A batch without any sample left raises its last error, as does a sample that is read by itself.
        through: a source of samples that is nearer than the storage, such as the result of `DataClient.samples`.
            Samples that it does not have are read from storage.

    Raises:
        OptionError, OptionTypeError: an option is not allowed, or `through` has samples of another dataset.
    """

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Pass on the order in which samples will be read, see `lookahead`. Loaders call it as an epoch begins."""
        if self._through is not None:
            announce_order(self._through, order, spread, extends)
