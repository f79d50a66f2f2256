"""Bytes of objects on every storage, by URL: contract, implementations, retries, overlap."""

from torch_dpflow.datasets.storage.base import ByteRange, Storage
from torch_dpflow.datasets.storage.object_reader import ObjectReader, open_storage
from torch_dpflow.datasets.storage.options import ReadOptions

__all__ = ["ByteRange", "ObjectReader", "ReadOptions", "Storage", "open_storage"]
