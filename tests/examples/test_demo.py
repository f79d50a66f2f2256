"""The demonstration, in small: five acts, one table and a picture, and nothing left after Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from rich.console import Console

from examples import natural_images
from examples.bar_picture import BLUE, RED, Bar, bar_picture
from tests.later import Later

demo: Any = Later("examples.demo")
train_classifier: Any = Later("examples.train_classifier")

TRAIN, VAL = 16, 4


def left_in(folder: Path) -> list[str]:
    """What lies in `folder`, which is the temporary directory too, but for the cache that torch keeps."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def start(folder: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"TMPDIR": str(folder), "COLUMNS": "200"}
    command = [
        sys.executable,
        "-m",
        "examples.demo",
        f"--data={folder / 'images'}",
        f"--picture={folder / 'demo.svg'}",
        f"--train={demo.MIN_TRAIN}",
        f"--val={VAL}",
        "--epochs=1",
    ]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_both_loaders_give_the_same_batches_and_losses(tmp_path: Path) -> None:
    images = natural_images.Specification(classes=demo.CLASSES, train=TRAIN, val=VAL)
    natural_images.generate(tmp_path / "images", images, processes=1, progress=False)
    row = demo.Demonstration(Console(quiet=True), options_of(tmp_path)).swap()
    assert row.torch == row.ours
    assert re.fullmatch(r"batches [0-9a-f]{8}, loss \d\.\d{4}", row.torch)
    assert row.gain == "the same batches and loss, bit for bit"


def options_of(folder: Path) -> Any:
    return demo.Options(data=folder / "images", train=TRAIN, epochs=1)


def test_it_says_where_figures_depend_on_other_work_or_a_slow_machine() -> None:
    assert "processor time, not of images/s" in demo.speed(60.0, 20.0)
    assert "machine is slow" in demo.speed(200.0, 390.0)
    assert demo.speed(40.0, 60.0) == "The acts took 40 s, and 60 s of processor time."


def test_a_picture_has_a_bar_for_each_rate() -> None:
    bars = [Bar("a & b", [(RED, 100.0)], "100"), Bar("c", [(BLUE, 50.0), (RED, 150.0)], "200")]
    drawn = bar_picture("rates", bars, ["killed < ended"], [(RED, "lost")])
    root = ElementTree.fromstring(drawn)
    name = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{name}rect")[2:]
    left, width = ([float(box.attrib[side]) for box in boxes] for side in ("x", "width"))
    assert [2 * width[0], 3 * width[1]] == pytest.approx([width[1] + width[2], width[2]], abs=0.3)
    assert left[2] == pytest.approx(left[0] + width[1], abs=0.1)
    texts = [one.text for one in root.findall(f"{name}text")]
    assert texts == ["rates", "lost", "a & b", "100", "c", "200", "killed < ended"]


def test_training_by_hand_says_what_makes_the_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_classifier.main([f"--data={tmp_path}"])
    said = capsys.readouterr().err
    assert f"{tmp_path / 'train'} is missing" in said
    assert "make demo" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_acts_one_table_and_a_picture(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        printed, said = process.communicate()
    assert process.returncode == 0, said
    assert "THEY DIFFER" not in printed
    assert [line[:6] for line in printed.splitlines() if " of 5  " in line] == [f"{one} of 5" for one in range(1, 6)]
    table = printed[printed.index("torch's DataLoader and torch_dpflow") :]
    for words in ("bit for bit", "of 11 batches, then", "undisturbed", "0 read twice, 0 lost", "Try next:"):
        assert words in " ".join(table.split())
    assert ElementTree.parse(tmp_path / "demo.svg").getroot().tag.endswith("svg")
    assert sorted(left_in(tmp_path)) == ["demo.svg", "images"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ctrl_c_while_training_leaves_no_process_and_no_file(tmp_path: Path, eventually: Callable[..., None]) -> None:
    images = natural_images.Specification(classes=demo.CLASSES, train=demo.MIN_TRAIN, val=VAL)
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


@pytest.mark.slow
def test_ctrl_c_while_generating_leaves_no_file(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with start(tmp_path) as process:
        eventually(lambda: any(tmp_path.glob("images.partial/*/*/*.jpg")), what="the first image")
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert left_in(tmp_path) == []
