"""The training example on a handful of images: it trains, it checkpoints, and it goes on exactly."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import natural_images
from tests.holdings import Holdings
from tests.later import Later
from tests.new_process import FORK
from torch_dpflow._core.processes import sweep

train_classifier = Later("examples.train_classifier")
IMAGES = natural_images.Specification(classes=2, train=16, val=4)
#: An epoch is four batches of four. The model has dropout, so it draws random numbers as it trains.
SMALL = (
    "--arch=mobilenet_v3_small",
    "--epochs=2",
    "--batch-size=4",
    "--image-size=32",
    "--lr=0.01",
    "--threads=1",
    "--workers=1",
    "--quiet",
)
BATCHES = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "data"
    natural_images.generate(folder, IMAGES, processes=1, progress=False)
    return folder


@pytest.fixture
def train(data: Path) -> Callable[..., int]:
    return lambda *arguments: train_classifier.main([f"--data={data}", *SMALL, *map(str, arguments)])


def checkpoint_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pth", weights_only=True)


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["model"].keys() == other["model"].keys()
    for name, weights in one["model"].items():
        assert torch.equal(weights, other["model"][name]), name
    losses = [
        [(epoch["train_loss"], epoch["val_loss"], epoch["accuracy"]) for epoch in run["history"]]
        for run in (one, other)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("loader", ["torch", "dpflow"])
def test_it_trains_and_sums_up(train: Callable[..., int], tmp_path: Path, loader: str) -> None:
    summary_file = tmp_path / "summary.json"
    assert train(f"--loader={loader}", "--epochs=1", f"--summary-json={summary_file}") == 0
    summary = json.loads(summary_file.read_text())
    assert summary["loader"] == loader
    assert summary["steps"] == BATCHES
    assert summary["samples_per_s"] > 0
    assert 0 <= summary["stall_share"] <= 1
    assert 0 < summary["time_to_first_batch_s"] < summary["epochs"][0]["seconds"]
    assert 0 <= summary["accuracy"] <= 1
    assert (summary["loader_stats"] is not None) == (loader == "dpflow")


def test_same_seed_same_weights_other_seed_others(train: Callable[..., int], tmp_path: Path) -> None:
    """With torch's loader: `test_torch_resumes_at_an_epoch_boundary_exactly`."""
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        train("--loader=dpflow", "--epochs=1", f"--seed={seed}", f"--output={tmp_path / name}")
    one, two, three = (checkpoint_of(tmp_path / name) for name in ("one", "two", "three"))
    assert_same_training(one, two)
    assert one["history"][0]["train_loss"] != three["history"][0]["train_loss"]


@pytest.mark.parametrize(
    "steps", [3, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (BATCHES, BATCHES + 2))]
)
def test_resume_equals_an_uninterrupted_run(
    train: Callable[..., int], tmp_path: Path, uninterrupted: dict[str, Any], steps: int
) -> None:
    train("--loader=dpflow", f"--output={tmp_path}", f"--max-steps={steps}")
    assert checkpoint_of(tmp_path)["steps"] == steps
    train("--loader=dpflow", f"--output={tmp_path}", f"--resume={tmp_path / 'checkpoint.pth'}", "--workers=2")
    assert_same_training(checkpoint_of(tmp_path), uninterrupted)


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_classifier.main([f"--data={data}", *SMALL, "--loader=dpflow", f"--output={folder}"])
    return checkpoint_of(folder)


def test_a_killed_training_goes_on_from_its_last_checkpoint(
    train: Callable[..., int],
    tmp_path: Path,
    uninterrupted: dict[str, Any],
    eventually: Callable[..., None],
) -> None:
    before = Holdings.now()
    arguments = ("--loader=dpflow", f"--output={tmp_path}", "--checkpoint-every=1")
    # An interpreter of its own would import for longer than it trains.
    process = FORK.Process(target=train, args=arguments)
    process.start()
    eventually((tmp_path / "checkpoint.pth").exists, what="the first checkpoint")
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()

    def swept() -> bool:
        sweep()  # as the next loader does, once the workers' last threads have ended
        return not Holdings.now().beyond(before)

    eventually(swept, what="the end of what it left")
    train("--loader=dpflow", f"--output={tmp_path}", f"--resume={tmp_path / 'checkpoint.pth'}")
    assert_same_training(checkpoint_of(tmp_path), uninterrupted)


def test_torch_resumes_at_an_epoch_boundary_exactly(train: Callable[..., int], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train("--loader=torch", f"--output={whole}")
    train("--loader=torch", f"--output={parts}", f"--max-steps={BATCHES}")
    train("--loader=torch", f"--output={parts}", f"--resume={parts / 'checkpoint.pth'}")
    assert_same_training(checkpoint_of(whole), checkpoint_of(parts))


def test_torch_leaves_out_the_rest_of_an_epoch_and_says_so(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--loader=torch", f"--output={tmp_path}", "--max-steps=2")
    train("--loader=torch", f"--output={tmp_path}", f"--resume={tmp_path / 'checkpoint.pth'}")
    assert "cannot go on after batch 2 of epoch 1" in capsys.readouterr().out
    assert [epoch["epoch"] for epoch in checkpoint_of(tmp_path)["history"]] == [2]
    assert checkpoint_of(tmp_path)["steps"] == 2 + BATCHES


def test_a_checkpoint_of_another_run_is_refused(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--loader=torch", f"--output={tmp_path}", "--max-steps=1")
    with pytest.raises(SystemExit):
        train("--loader=torch", f"--resume={tmp_path / 'checkpoint.pth'}", "--batch-size=8")
    assert "batch_size is 4, not 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        "--epochs=0",
        "--batch-size=-1",
        "--limit-batches=0",
        "--loader=other",
        "--workers=-1",
        "--lr=nan",
        "--lr=0",
        "--momentum=inf",
        "--weight-decay=-1",
        "--label-smoothing=1.5",
        "--seed=-1",
        f"--seed={2**32}",
    ],
)
def test_wrong_options_are_refused_by_name(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        train(option)
    assert f"argument {option.split('=')[0]}: " in capsys.readouterr().err


def test_limit_batches_keeps_every_class(train: Callable[..., int], tmp_path: Path) -> None:
    train("--loader=torch", "--limit-batches=1", "--epochs=1", f"--output={tmp_path}")
    assert checkpoint_of(tmp_path)["history"][0]["trained"] == 4
    assert checkpoint_of(tmp_path)["options"]["classes"] == ["class_00", "class_01"]
