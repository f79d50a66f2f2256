"""The benchmark of opened data: both sides read every sample of the same files."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from benchmarks.open_data import METRICS, measure
from benchmarks.open_data_sides import WRITERS, Data

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files


@pytest.mark.parametrize(
    ("kind", "side"), [("tar", "webdataset"), ("tar", "open_dataset"), ("parquet", "open_dataset")]
)
def test_every_sample_is_read_and_every_figure_reported(tmp_path: Path, kind: str, side: str) -> None:
    if side == "webdataset" and importlib.util.find_spec("webdataset") is None:
        pytest.skip("webdataset is not installed")
    WRITERS[kind](tmp_path / kind, 80, 100)
    figures = measure(side, Data(kind, tmp_path), 80)
    assert figures.keys() == {metric.name for metric in METRICS}
    assert all(value > 0 for name, value in figures.items() if name != "random_us")
    assert math.isnan(figures["random_us"]) == (side == "webdataset")
