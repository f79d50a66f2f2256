"""Datasets by name, on any storage: the storage specification, the store, importers and the reader."""

from torch_dpflow.datasets.draft import Draft
from torch_dpflow.datasets.import_progress import json_schemas
from torch_dpflow.datasets.spec import Dataset, DatasetRef, DatasetShardMeta, SampleMeta, Variant
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.datasets.verify import Problem, verify

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
    "verify",
]
