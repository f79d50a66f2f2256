"""The data service: a dataset's bytes in the memory of a few hosts, and reading ahead of a known order.

Users call it the pool. `cluster.cache` is another one: what a shard of a flow has loaded, one object a sample.
"""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.pool.client import DataClient
    from torch_dpflow.pool.messages.protocol import ArraySource, SetInfo
    from torch_dpflow.pool.pooled import PooledDataset
    from torch_dpflow.pool.pooled_array import PooledArray
    from torch_dpflow.pool.server.data_server import DataServer
    from torch_dpflow.pool.sources.arrays import open_array

__all__ = ["ArraySource", "DataClient", "DataServer", "PooledArray", "PooledDataset", "SetInfo", "open_array"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "sources.arrays": ["open_array"],
        "client": ["DataClient"],
        "pooled": ["PooledDataset"],
        "pooled_array": ["PooledArray"],
        "messages.protocol": ["ArraySource", "SetInfo"],
        "server.data_server": ["DataServer"],
    },
)
