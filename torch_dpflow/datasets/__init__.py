"""Datasets by name, on any storage: the storage specification, the store, importers and the reader."""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names
from torch_dpflow.datasets.draft import Draft
from torch_dpflow.datasets.spec import Dataset, DatasetRef, DatasetShardMeta, SampleMeta, Variant
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.datasets.versions import Problem, verify
from torch_dpflow.datasets.writer import json_schemas

if TYPE_CHECKING:
    from torch_dpflow.datasets.opening import open_dataset

__all__ = [
    "Dataset",
    "DatasetRef",
    "DatasetShardMeta",
    "DatasetStore",
    "Draft",
    "Problem",
    "SampleMeta",
    "StoredDataset",
    "Variant",
    "json_schemas",
    "open_dataset",
    "verify",
]

# It needs torch, which importing takes seconds.
__getattr__, __dir__ = lazy_names(__name__, {"opening": ["open_dataset"]})
