"""The JSON schemas of a store's files."""

from __future__ import annotations

from typing import Any

import msgspec

from torch_dpflow.datasets.import_progress import DraftRecord, ImportedShard, ImportedVariant
from torch_dpflow.datasets.spec import Dataset, DatasetShardMeta, SpecStruct, StoreRecord

_KINDS: tuple[type[SpecStruct], ...] = (
    *(StoreRecord, Dataset, DatasetShardMeta),
    *(DraftRecord, ImportedShard, ImportedVariant),
)


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema (draft 2020-12) of each kind of file, by kind: published files, then those of imports."""
    return {str(kind.__struct_config__.tag): msgspec.json.schema(kind) for kind in _KINDS}
