"""Importers: describe a source sample by sample."""

from torch_dpflow.datasets.importers.base import Importer, Item
from torch_dpflow.datasets.importers.importer_registry import IMPORTERS, importer_class

__all__ = ["IMPORTERS", "Importer", "Item", "importer_class"]
