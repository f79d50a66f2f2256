"""Importers: what describes a source, sample by sample, so that a store can take it in."""

from torch_dpflow.datasets.importers.base import Importer, Item
from torch_dpflow.datasets.importers.importer_registry import IMPORTERS, importer_class

__all__ = ["IMPORTERS", "Importer", "Item", "importer_class"]
