"""The demonstration, in small: one table at its end, and nothing left after Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from examples import demo, natural_images, train_classifier

TRAIN, VAL = 8, 4
SMALL = (f"--train={TRAIN}", f"--val={VAL}", "--epochs=1")


def left_in(folder: Path) -> list[str]:
    """What lies in `folder`, which is the temporary directory too, but for the cache that torch keeps."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def start(folder: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"TMPDIR": str(folder), "COLUMNS": "120"}
    command = [sys.executable, "-m", "examples.demo", f"--data={folder / 'images'}", *SMALL]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_the_table_has_a_row_of_figures_for_each_loader() -> None:
    summary = {"samples_per_s": 50.2, "stall_share": 0.1, "time_to_first_batch_s": 0.25, "accuracy": 0.5}
    console = Console(width=120)
    with console.capture() as captured:
        console.print(demo.results(dict.fromkeys(demo.LOADERS, summary)))
    assert_is_table(captured.get())


def test_training_by_hand_says_what_makes_the_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_classifier.main([f"--data={tmp_path}"])
    said = capsys.readouterr().err
    assert f"{tmp_path / 'train'} is missing" in said
    assert "make demo" in said


@pytest.mark.slow
def test_it_ends_with_one_table_of_both_loaders(tmp_path: Path) -> None:
    """Two trainings of a resnet18, each in a process that imports torchvision and torch's compiler."""
    with start(tmp_path) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0
    assert_is_table(printed[printed.index("resnet18") :])
    assert left_in(tmp_path) == ["images"]


def assert_is_table(table: str) -> None:
    for heading in ("samples/s", "stall share", "time to first batch", "accuracy"):
        assert heading in table
    rows = [line.split("│")[1:6] for line in table.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["torch", "dpflow"]
    assert all(cell.strip() for row in rows for cell in row)


@pytest.mark.slow
def test_ctrl_c_while_training_leaves_no_process_and_no_file(tmp_path: Path, eventually: Callable[..., None]) -> None:
    images = natural_images.Specification(classes=demo.CLASSES, train=TRAIN, val=VAL)
    natural_images.generate(tmp_path / "images", images, processes=1, progress=False)
    with start(tmp_path) as process:
        family = psutil.Process(process.pid)

        def training() -> list[psutil.Process]:
            # Its children are the loader's workers.
            return [child for trainer in family.children() for child in trainer.children(recursive=True)]

        eventually(training, what="the loader's workers")
        descendants = family.children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in printed
    eventually(lambda: not any(child.is_running() for child in descendants), what="the end of all processes")
    assert left_in(tmp_path) == ["images"]


def test_ctrl_c_while_generating_leaves_no_file(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with start(tmp_path) as process:
        eventually(lambda: any(tmp_path.glob("images.partial/*/*/*.jpg")), what="the first image")
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert left_in(tmp_path) == []
