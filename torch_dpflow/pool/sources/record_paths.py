"""Records of a stored dataset by the path of their object."""

from __future__ import annotations

import hashlib

import numpy as np

from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import ObjectMissingError, OptionError
from torch_dpflow.pool.sources.set_names import all_samples


class RecordPaths:
    """The numbers of records by path, as the metadata of the dataset has it: 16 bytes a record.

    Reads all metadata when it is made. Raises as `StoredDataset.shard`.
    """

    def __init__(self, stored: StoredDataset) -> None:
        self._stored = stored
        digests = np.fromiter((_digest(one.path) for one in all_samples(stored)), np.uint64, len(stored))
        self._order = np.argsort(digests, kind="stable")
        self._digests = digests[self._order]

    def number(self, path: str) -> int:
        """The number of the record at this path: reads its metadata again, so that no digest is trusted.

        Raises:
            ObjectMissingError: there is none.
            OptionError: several lie there.
        """
        first, last = (
            np.searchsorted(self._digests, np.uint64(_digest(path)), side) for side in ("left", "right")
        )
        if last - first > 1:
            raise OptionError(
                f"{last - first} records of {self._stored.ref} lie at {path!r}; read them by number, the first is "
                f"{self._order[first]}"
            )
        if last == first or self._stored.sample(int(self._order[first])).path != path:
            raise ObjectMissingError(
                f"no record of {self._stored.ref} lies at {path!r}; give the path that its metadata has, as "
                f"{self._stored.sample(0).path!r}, or a number"
            )
        return int(self._order[first])


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
