"""Tar shards to open, and a directory of indexes for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def index_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of indexes, which is empty."""
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(tmp_path / "index"))
    monkeypatch.delenv("DPFLOW_STORE", raising=False)
    return tmp_path / "index"
