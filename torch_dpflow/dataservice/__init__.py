"""The data service: a dataset's bytes in the memory of a few hosts, and reading ahead of a known order.

Users call it the pool. `remote.pool` is another one: what a shard of a flow has loaded, one object a sample.
"""

from typing import TYPE_CHECKING

from torch_dpflow.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.dataservice.client import DataClient
    from torch_dpflow.dataservice.pooled import PooledDataset
    from torch_dpflow.dataservice.protocol import SetInfo
    from torch_dpflow.dataservice.server import DataServer

__all__ = ["DataClient", "DataServer", "PooledDataset", "SetInfo"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "client": ["DataClient"],
        "pooled": ["PooledDataset"],
        "protocol": ["SetInfo"],
        "server": ["DataServer"],
    },
)
