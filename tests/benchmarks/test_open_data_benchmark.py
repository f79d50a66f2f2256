"""The benchmark of opened data: both sides read every sample of the same shards."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.open_data import METRICS, SIDES, measure, write_shards

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files


@pytest.mark.parametrize("side", SIDES)
def test_every_sample_is_read_and_every_figure_reported(tmp_path: Path, side: str) -> None:
    if side == "webdataset" and importlib.util.find_spec("webdataset") is None:
        pytest.skip("webdataset is not installed")
    write_shards(tmp_path / "data", 80, 100)
    figures = measure(side, f"{tmp_path}/data/train-{{000..007}}.tar", False, 80)
    assert figures.keys() == {metric.name for metric in METRICS}
    assert all(value > 0 for name, value in figures.items() if name != "index_s")
