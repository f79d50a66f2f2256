"""Files of a table that are removed, empty, or named twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets.storage.test_tables import WRITERS, Write, rows, write_parquet, write_stream
from torch_dpflow.datasets import open_dataset, tables
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.errors import ObjectMissingError, SourceError


@WRITERS
def test_a_file_that_is_removed_after_opening_is_named(tmp_path: Path, write: Write, ending: str) -> None:
    """Its rows may be held, or mapped; its directory may be gone too."""
    path = tmp_path / "below" / f"a{ending}"
    path.parent.mkdir()
    write(path, rows())
    fresh, used = TableDataset(path), TableDataset(path)
    assert used[0] == rows()[0]
    path.unlink()
    for table in (fresh, used):
        with pytest.raises(ObjectMissingError, match=rf"a{ending}: there is no such file"):
            table[0]
    path.parent.rmdir()
    with pytest.raises(ObjectMissingError, match=rf"a{ending}: there is no such file"):
        used[90]


@WRITERS
def test_a_file_that_is_removed_while_it_is_opened_is_named(
    tmp_path: Path, write: Write, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a{ending}"
    write(path, rows())
    opened = tables._blocks_of

    def removed(reader: Any, file: Any) -> Any:
        path.unlink()
        return opened(reader, file)

    monkeypatch.setattr(tables, "_blocks_of", removed)
    with pytest.raises(ObjectMissingError, match=rf"a{ending}"):
        TableDataset(path)


@WRITERS
def test_a_table_without_rows_is_refused_as_all_formats_are(tmp_path: Path, write: Write, ending: str) -> None:
    pa_schema = pa.Table.from_pylist(rows(1)).schema
    for name in ("a", "b"):
        path = tmp_path / f"{name}{ending}"
        if write is write_parquet:
            pq.write_table(pa_schema.empty_table(), path)
        else:
            with (pa.ipc.new_stream if write is write_stream else pa.ipc.new_file)(str(path), pa_schema):
                pass
    for source in (tmp_path / f"a{ending}", tmp_path):
        with pytest.raises(SourceError, match=rf"a{ending}.* no samples; check what wrote it"):
            open_dataset(source)
    write(tmp_path / f"b{ending}", rows(3))
    assert [*TableDataset(tmp_path)] == rows(3)


def test_a_file_that_huggingface_names_twice_is_refused(tmp_path: Path) -> None:
    write_stream(tmp_path / "data-0.arrow", rows(3))
    (tmp_path / "state.json").write_text(
        '{"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-0.arrow"}]}'
    )
    with pytest.raises(SourceError, match=r"state.json is damaged: .*names 'data-0.arrow' twice"):
        TableDataset(tmp_path)
