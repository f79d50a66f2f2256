"""The three tasks through flows: the same learning with torch's loader and ours, on a handful of samples."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.later import Later
from tests.shared_cluster import TestCluster

tv_tensors, v2 = Later("torchvision.tv_tensors"), Later("torchvision.transforms.v2")
classify_digits, detect_shapes, transcribe_tones = (
    Later(f"examples.{name}") for name in ("classify_digits", "detect_shapes", "transcribe_tones")
)

TASKS = {"digits": classify_digits, "shapes": detect_shapes, "tones": transcribe_tones}
SMALL = ("--train=16", "--val=4", "--batch-size=8", "--workers=1", "--quiet")

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture
def train(store: Path, tmp_path: Path) -> Train:
    """Run an example; its summary."""

    def train(task: str, *options: str) -> dict[str, Any]:
        path = tmp_path / "summary.json"
        assert TASKS[task].main([f"--store={store}", *SMALL, f"--summary-json={path}", *options]) == 0
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary

    return train


#: A detector learns slowest; `test_remote_reader` and `test_torchvision` read boxes with it and without.
BY_SPEED = ["digits", "tones", pytest.param("shapes", marks=pytest.mark.slow)]


@pytest.mark.parametrize("task", BY_SPEED)
def test_both_loaders_give_the_same_losses_step_by_step(train: Train, task: str) -> None:
    theirs, ours = (train(task, f"--loader={loader}", "--epochs=2") for loader in ("torch", "dpflow"))
    assert len(ours["losses"]) == 4
    assert all(map(math.isfinite, ours["losses"]))
    assert ours["losses"] == theirs["losses"]
    figures = [
        [
            {name: value for name, value in epoch.items() if name not in ("samples_per_s", "stall_share")}
            for epoch in run
        ]
        for run in (ours["epochs"], theirs["epochs"])
    ]
    assert figures[0] == figures[1]
    assert all(0 <= epoch["stall_share"] <= 1 for epoch in ours["epochs"])


def test_the_loss_falls(train: Train) -> None:
    losses = train("tones", "--train=32", "--epochs=5")["losses"]
    assert len(losses) == 20
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def test_it_stops_after_as_many_steps_as_were_asked_for(train: Train) -> None:
    assert len(train("tones", "--max-steps=2")["losses"]) == 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    started = TestCluster.start(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_cluster_loads_for_a_task_that_is_run_as_a_script(
    cluster: TestCluster, store: Path, tmp_path: Path, task: str
) -> None:
    path = tmp_path / "summary.json"
    command = [sys.executable, "-m", TASKS[task].__name__, f"--store={store}", *SMALL]
    command += [f"--address={cluster.address}", f"--summary-json={path}", "--epochs=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stall_share") == 2
    losses = json.loads(path.read_text())["losses"]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))


def test_an_address_is_for_our_loader_only(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train("tones", "--loader=torch", "--address=ipc:///nowhere")
    assert "--address is for --loader dpflow" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--address=nope", "--workers=-1", "--lr=nan", "--seed=-1"])
def test_wrong_options_are_refused_by_name(train: Train, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit):
        train("tones", option)
    assert f"argument {option.split('=')[0]}: " in capsys.readouterr().err


# -- what the tasks are made of -----------------------------------------------------------------------------


def test_generated_samples_repeat_and_differ_between_variants() -> None:
    for module in TASKS.values():
        first, again, other = (list(module.generate(variant, 3)) for variant in ("train", "train", "val"))
        assert first == again
        assert not {data for data, _ in first} & {data for data, _ in other}


def test_there_are_only_so_many_digits() -> None:
    with pytest.raises(SystemExit, match="--val 1000"):
        next(classify_digits.generate("val", 1000))


def test_boxes_follow_the_image() -> None:
    image = torch.zeros(3, 20, 40)
    boxes = tv_tensors.BoundingBoxes([[2.0, 5, 12, 15]], format="XYXY", canvas_size=(20, 40))
    _, target = v2.RandomHorizontalFlip(p=1)((image, {"boxes": boxes, "labels": torch.tensor([1])}))
    assert target["boxes"].tolist() == [[28, 5, 38, 15]]


def test_boxes_that_were_decoded_are_in_pixels_of_their_image() -> None:
    torch.manual_seed(0)
    model = detect_shapes.build_model().eval()
    with torch.inference_mode():
        large, small = detect_shapes.best_boxes(model, [torch.zeros(3, 256, 512), torch.zeros(3, 128, 128)])
    assert large.shape == (len(detect_shapes.CLASSES), 4)
    assert torch.allclose(large, small * torch.tensor([4.0, 2, 4, 2]), atol=0.5)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [([], [], 0), ([1, 2], [1, 2], 0), ([], [3, 4], 2), ([1, 2, 3], [2, 3], 1), ([1, 2, 3], [1, 4, 5, 3], 2)],
)
def test_edits_are_counted_as_levenshtein_does(one: list[int], other: list[int], distance: int) -> None:
    assert transcribe_tones.edits(one, other) == transcribe_tones.edits(other, one) == distance


def test_the_likeliest_path_drops_repeats_and_blanks() -> None:
    path = torch.nn.functional.one_hot(torch.tensor([0, 2, 2, 0, 2, 1, 1, 0]), 3)
    assert transcribe_tones.greedy(path) == [2, 2, 1]


def test_a_tone_falls_into_the_band_of_its_frequency() -> None:
    for hertz, band in ((500, 11), (2000, 28)):
        seconds = torch.arange(transcribe_tones.RATE) / transcribe_tones.RATE
        features = transcribe_tones.LogMel()(torch.sin(2 * math.pi * hertz * seconds))
        mel = 2595 * math.log10(1 + hertz / 700)
        highest = 2595 * math.log10(1 + transcribe_tones.RATE / 2 / 700)
        expected = round(mel / highest * (transcribe_tones.BANDS + 1)) - 1
        assert expected == band
        assert abs(int(features.mean(0).argmax()) - expected) <= 1


def test_masks_leave_the_rest_alone() -> None:
    features = torch.ones(50, transcribe_tones.BANDS)
    torch.manual_seed(1)
    masked = [transcribe_tones.masked(features, axis=1, widest=6) for _ in range(20)]
    widths = {int((part == 0).all(0).sum()) for part in masked}
    assert widths <= set(range(7))
    assert len(widths) > 2
    assert all(((part == 0).any(0) == (part == 0).all(0)).all() for part in masked)
