"""Storages: the bytes of any object, by its URL."""

from torch_dpflow.datasets.storage.base import ByteRange, ReadOptions, Storage
from torch_dpflow.datasets.storage.object_reader import ObjectReader, open_storage

__all__ = ["ByteRange", "ObjectReader", "ReadOptions", "Storage", "open_storage"]
