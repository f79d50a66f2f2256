"""The data service: a dataset's bytes in the memory of a few hosts, and reading ahead of a known order.

Users call it the pool. `remote.pool` is another one: what a shard of a flow has loaded, one object a sample.
"""

from typing import TYPE_CHECKING

from torch_dpflow.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.dataservice.arrays import open_array
    from torch_dpflow.dataservice.client import DataClient
    from torch_dpflow.dataservice.pooled import PooledDataset
    from torch_dpflow.dataservice.pooled_array import PooledArray
    from torch_dpflow.dataservice.protocol import ArraySource, SetInfo
    from torch_dpflow.dataservice.server import DataServer

__all__ = ["ArraySource", "DataClient", "DataServer", "PooledArray", "PooledDataset", "SetInfo", "open_array"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "arrays": ["open_array"],
        "client": ["DataClient"],
        "pooled": ["PooledDataset"],
        "pooled_array": ["PooledArray"],
        "protocol": ["ArraySource", "SetInfo"],
        "server": ["DataServer"],
    },
)
