"""torch_dpflow: a drop-in replacement for torch.utils.data.DataLoader on elastic workers."""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names
from torch_dpflow._version import __version__

if TYPE_CHECKING:
    from torch_dpflow.caches import ALSDCache
    from torch_dpflow.cluster.client.options import JobOptions
    from torch_dpflow.datasets import DatasetStore, open_dataset
    from torch_dpflow.epoch.shards import ShardedIterableDataset
    from torch_dpflow.errors import DPFlowError
    from torch_dpflow.flows import DataLoadFlow
    from torch_dpflow.loader.dataset_export import export_dataset
    from torch_dpflow.loader.loader import DPFlowDataLoader
    from torch_dpflow.metrics import LoaderStats
    from torch_dpflow.options import LoaderOptions
    from torch_dpflow.pool import PooledDataset
    from torch_dpflow.samplers import BudgetBatchSampler, DynaGCSSampler, MixtureSampler, Phase

__all__ = [
    "ALSDCache",
    "BudgetBatchSampler",
    "DPFlowDataLoader",
    "DPFlowError",
    "DataLoadFlow",
    "DatasetStore",
    "DynaGCSSampler",
    "JobOptions",
    "LoaderOptions",
    "LoaderStats",
    "MixtureSampler",
    "Phase",
    "PooledDataset",
    "ShardedIterableDataset",
    "__version__",
    "export_dataset",
    "open_dataset",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "caches": ["ALSDCache"],
        "pool": ["PooledDataset"],
        "datasets": ["DatasetStore", "open_dataset"],
        "epoch.shards": ["ShardedIterableDataset"],
        "errors": ["DPFlowError"],
        "flows": ["DataLoadFlow"],
        "loader": ["DPFlowDataLoader"],
        "loader.dataset_export": ["export_dataset"],
        "metrics": ["LoaderStats"],
        "options": ["LoaderOptions"],
        "cluster.client.options": ["JobOptions"],
        "samplers": ["BudgetBatchSampler", "DynaGCSSampler", "MixtureSampler", "Phase"],
    },
)
