"""Both sides of the dataset store's benchmark describe the same samples."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.dataset_store import METRICS, OneFile, items, measure, open_store, prepare


def test_both_sides_describe_the_same_samples(tmp_path: Path) -> None:
    prepare(tmp_path, 2500)
    expected = [(item.path, item.length, item.meta) for item in items(2500)]
    one_file, store = OneFile(tmp_path), open_store(tmp_path)
    assert len(one_file) == len(store) == 2500
    assert [(r.path, r.length, r.meta) for r in one_file.samples()] == expected
    assert [(s.path, s.length, s.fields()) for s in store.samples()] == expected
    assert msgspec.structs.asdict(one_file.sample(1234))["path"] == store.sample(1234).path


def test_every_figure_is_reported(tmp_path: Path) -> None:
    prepare(tmp_path, 10)
    for side in ("one file", "store"):
        assert measure(side, tmp_path).keys() == {metric.name for metric in METRICS}
