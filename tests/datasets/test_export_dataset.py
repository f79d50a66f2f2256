"""Export of any dataset: equal to that of a store, by any number of workers, whatever is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.datasets.test_export import contents, samples, stored_of
from tests.loader_cases import Stream
from tests.new_process import run_interpreter
from torch_dpflow import export_dataset, open_dataset
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.datasets.export import export
from torch_dpflow.errors import OptionError, OptionTypeError, SourceError


class Given(Dataset[Any]):
    def __init__(self, count: int, mark: Path | None = None) -> None:
        self.samples, self.mark = samples(count), mark

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, Mapping[str, Any]]:
        in_worker = torch.utils.data.get_worker_info() is not None
        if self.mark is not None and index == 170 and in_worker and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.samples[index]


class Together(Given):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.samples[index] for index in indices]


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_files_equal_those_of_a_store(local_store: DatasetStore, tmp_path: Path, format: Any, workers: int) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    export(stored_of(local_store, samples(200)), tmp_path / "store", format=format, samples_per_file=90)
    expected = {name: data for name, data in contents(tmp_path / "store").items() if not name.startswith(".")}
    assert len(expected) == 3
    before = torch.get_rng_state(), np.random.get_state()[1]  # type: ignore[index]
    for kind in (Given(200, tmp_path / "mark"), Together(200)):
        target = tmp_path / type(kind).__name__
        shown: list[int] = []
        exported = export_dataset(
            kind, target, format=format, samples_per_file=90, workers=workers, progress=shown.append
        )
        assert (exported.samples, exported.kept, shown) == (200, 0, [90, 180, 200])
        assert {name: data for name, data in contents(target).items() if not name.startswith(".")} == expected
    assert (tmp_path / "mark").exists() is (workers > 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]


def test_the_size_of_files_is_that_of_their_samples(tmp_path: Path) -> None:
    export_dataset(Given(150), tmp_path / "out", file_size="20KiB", name="val", workers=0)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("val-*.tar")]
    assert len(sizes) > 3
    dataset = open_dataset(tmp_path / "out", index_dir=tmp_path / "index")
    assert [dataset[number]["png"] for number in range(len(dataset))] == [data for data, _ in samples(150)]


def test_random_transforms_depend_on_the_number_of_the_sample_alone(tmp_path: Path) -> None:
    def augmented(sample: Any) -> Any:
        return bytes([int(torch.randint(256, ())), int(np.random.randint(256))]) + sample[0], {}

    for workers in (0, 3):
        export_dataset(Given(100), tmp_path / str(workers), encode=augmented, samples_per_file=40, workers=workers)
    assert contents(tmp_path / "0") == contents(tmp_path / "3")
    (tmp_path / "3/train-000001.tar").unlink()
    again = export_dataset(Given(100), tmp_path / "3", encode=augmented, samples_per_file=40, workers=1, resume=True)
    assert again.kept == 2
    assert contents(tmp_path / "0") == contents(tmp_path / "3")


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.datasets.test_export_dataset import Given
from torch_dpflow import export_dataset

def end(samples):
    if samples == 80: os.kill(os.getpid(), signal.SIGKILL)

export_dataset(Given(200), sys.argv[1], samples_per_file=40, workers=2, progress=end)
"""


def test_an_export_that_was_killed_goes_on_when_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    killed = run_interpreter(KILLED, str(tmp_path / "out"), env={"TMPDIR": str(tmp_path / "temporary")})
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["train-000000.tar", "train-000001.tar"]
    with pytest.raises(OptionError, match=r"has train-000000\.tar; give an empty directory or, .*, resume=True"):
        export_dataset(Given(200), tmp_path / "out", samples_per_file=40, workers=0)
    for other in (Given(199), Together(200)):
        with pytest.raises(OptionError, match="another export"):
            export_dataset(other, tmp_path / "out", samples_per_file=40, workers=0, resume=True)
    exported = export_dataset(Given(200), tmp_path / "out", samples_per_file=40, workers=0, resume=True)
    assert exported.kept == 2
    export_dataset(Given(200), tmp_path / "whole", samples_per_file=40, workers=0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


class Failing(Given):
    def __getitem__(self, index: int) -> Any:
        if index == 270:
            raise PermissionError("no such luck")
        return super().__getitem__(index)


class Various(Given):
    def __init__(self, late: Any) -> None:
        super().__init__(300)
        self.late = late

    def __getitem__(self, index: int) -> Any:
        return b"x", self.late if index == 270 else {"label": index}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path, workers: int) -> None:
    with pytest.raises(SourceError, match="sample 270 cannot be read: PermissionError: no such luck"):
        export_dataset(Failing(300), tmp_path / "out", samples_per_file=np.int64(50), workers=workers)  # type: ignore[arg-type]
    assert len([*(tmp_path / "out").glob("*.tar")]) == 5  # whole ones, before it
    with pytest.raises(SourceError, match="sample 270 cannot be read"):
        export_dataset(Failing(300), tmp_path / "none" / "deeper", workers=workers)  # in its first file
    with pytest.raises(SourceError, match=r"sample 0 is \(.*give encode=, a function of a sample"):
        export_dataset(torch.utils.data.TensorDataset(torch.ones(3)), tmp_path / "none", workers=workers)
    with pytest.raises(SourceError, match="sample 0 cannot be encoded: ZeroDivisionError"):
        export_dataset(Given(3), tmp_path / "none", encode=lambda one: 1 // 0, workers=workers)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (
            {"label": 0.5},
            "samples 250 to 299 have the annotation 'label' of type double, which is int64 in the first file",
        ),
        ({"label": 1, "more": 2}, "samples 250 to 299 have the annotation 'more', which the first file lacks"),
        ({"label": "one"}, "sample 270: label is a text, and an integer in sample 0"),
    ],
)
def test_annotations_that_do_not_fit_the_first_file_are_refused(
    tmp_path: Path, late: dict[str, Any], text: str
) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(SourceError, match=text):
        export_dataset(Various(late), tmp_path / "out", format="parquet", samples_per_file=50, workers=0)
    assert len([*(tmp_path / "out").glob("*.parquet")]) == 5
    export_dataset(
        Various(late), tmp_path / "json", format="parquet", samples_per_file=50, annotations="json", workers=0
    )


@pytest.mark.parametrize(
    ("dataset", "options", "kind", "text"),
    [
        (Stream(3), {}, OptionTypeError, "give a map-style dataset"),
        (Given(0), {}, OptionError, "has no samples"),
        (Given(3), {"name": "a/b"}, OptionError, r"name='a/b': give up to 64 letters"),
        (Given(3), {"encode": 3}, OptionTypeError, "encode=3 is of type int; give a function"),
        (Given(3), {"progress": 3}, OptionTypeError, "progress=3 is of type int; give a function"),
        (Given(3), {"options": [1]}, OptionTypeError, "give a dict of fsspec's options"),
        (Given(3), {"workers": -1}, OptionError, "workers=-1"),
        (Given(3), {"format": "zip"}, OptionError, "format='zip': give one of"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, dataset: Any, options: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        export_dataset(dataset, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
