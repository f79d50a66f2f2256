"""LitData's rows in Arrow's format, which it writes for bytes, numbers, texts, and lists and dicts of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_dpflow.datasets.importers.packed import LitDataImporter
from torch_dpflow.datasets.importers.sources import SourceFile, SourceFiles
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.errors import SourceError


class LitRows(TableDataset):
    """The rows of a LitData dataset whose chunks are Arrow files, in the order of its index.

    A sample is the dict that LitData gives, with the columns and types of its chunk.

    Args:
        how: see `TableDataset`.

    Raises SourceError: a chunk has a different number of rows than the index says; and the errors of `TableDataset`.
    """

    def __init__(self, dataset: LitDataImporter, **how: Any) -> None:
        self._listed = dataset
        super().__init__(dataset.files, **how)
        del self._listed

    def _find_files(self, found: SourceFiles, split: str | None) -> list[SourceFile]:
        return found.files

    def _count_blocks(self) -> list[list[int]]:
        counts = super()._count_blocks()
        for file, of_file in zip(self._files, counts, strict=True):
            listed = self._listed.samples_of(file)
            if sum(of_file) != listed:
                raise SourceError(
                    f"{file.printable} has {sum(of_file)} rows, and the index says {listed}; it was cut or replaced"
                )
        return counts

    def _joined_schema(self, schemas: Mapping[Any, SourceFile]) -> Any:
        return None  # a chunk may lack columns that no row of it has
