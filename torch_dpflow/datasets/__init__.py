"""Datasets by name, on any storage: the storage specification, the store, importers and the reader."""
