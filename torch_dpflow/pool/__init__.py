"""Dataset pool: caches datasets in the memory of one or several hosts, and reads ahead in announced orders.

Not to be confused with `cluster.cache`, which holds the loaded samples of a flow's shard.
"""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.pool.array import PooledArray
    from torch_dpflow.pool.array_files import open_array
    from torch_dpflow.pool.client import DataClient
    from torch_dpflow.pool.dataset import PooledDataset
    from torch_dpflow.pool.messages import ArraySource, CachedDataset
    from torch_dpflow.pool.server.data_server import DataServer

__all__ = [
    "ArraySource",
    "DataClient",
    "DataServer",
    "PooledArray",
    "PooledDataset",
    "CachedDataset",
    "open_array",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "array_files": ["open_array"],
        "client": ["DataClient"],
        "dataset": ["PooledDataset"],
        "array": ["PooledArray"],
        "messages": ["ArraySource", "CachedDataset"],
        "server.data_server": ["DataServer"],
    },
)
