"""The JSON schemas of a store's files, made from the structs that read and write them."""

from __future__ import annotations

from typing import Any

import msgspec

from torch_dpflow.datasets.spec import Dataset, DatasetShardMeta, SpecStruct, StoreRecord


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema (draft 2020-12) of each kind of file, by kind."""
    kinds: tuple[type[SpecStruct], ...] = (StoreRecord, Dataset, DatasetShardMeta)
    return {str(kind.__struct_config__.tag): msgspec.json.schema(kind) for kind in kinds}
