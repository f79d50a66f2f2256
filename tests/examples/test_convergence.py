"""The comparison of what both loaders teach: all sides are trained, reported and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples import natural_images
from tests.later import Later
from tests.shared_cluster import TestCluster

convergence = Later("examples.convergence")


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have matplotlib open its fonts, which it keeps open: before a test counts what it leaves behind."""
    run = convergence.Run(side="torch", seed=0, losses=[1.0], accuracies=[0.5], stall_share=None)
    convergence.plot([run], "fonts", tmp_path_factory.mktemp("fonts") / "curves.png")


@pytest.mark.slow
def test_each_side_learns_each_seed_and_is_drawn(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = TestCluster.start(tmp_path_factory.mktemp("c"))
    try:
        given = ["--epochs=2", "--seeds=2", "--workers=1", "--quiet", f"--address={cluster.address}"]
        assert convergence.main([*given, f"--plot={tmp_path / 'curves.png'}", f"--json={tmp_path / 'runs.json'}"]) == 0
    finally:
        cluster.stop()
    runs = json.loads((tmp_path / "runs.json").read_text())
    sides = ["torch", "dpflow private", "dpflow shared"]
    assert [(run["side"], run["seed"]) for run in runs] == [(side, seed) for seed in range(2) for side in sides]
    assert all(len(run["losses"]) == 2 and run["losses"][1] < run["losses"][0] for run in runs)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert all(f"| {side} |" in told for side in sides)


def test_the_report_has_means_spreads_and_differences() -> None:
    finals = {"torch": (0.9, 0.92), "dpflow private": (0.92, 0.93)}
    runs = [
        convergence.Run(side=side, seed=seed, losses=[1.0], accuracies=[value], stall_share=None)
        for side, values in finals.items()
        for seed, value in enumerate(values)
    ]
    lines = list(convergence.report(runs))
    assert lines[2] == "| torch | 91.00 | 1.41 | 90.00 to 92.00 | +0.00 |"
    assert lines[3] == "| dpflow private | 92.50 | 0.71 | 92.00 to 93.00 | +1.50 |"


def test_digits_are_split_and_shifted() -> None:
    problem = convergence.digits()
    images, labels = problem.test
    assert (len(problem.train), len(labels)) == (1347, 450)
    assert images.shape == (450, 1, 8, 8)
    torch.manual_seed(0)
    shifted = [problem.train[5][0] for _ in range(40)]
    assert len({tuple(image.flatten().tolist()) for image in shifted}) > 5
    assert all(image.sum() == shifted[0].sum() for image in shifted)


def test_jpegs_are_generated_once_and_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = natural_images.Specification(classes=2, train=8, val=4)
    natural_images.generate(tmp_path / "images", few, processes=1, progress=False)
    monkeypatch.setattr("examples.convergence.JPEGS", few)
    given = ["--problem=jpegs", "--epochs=1", "--seeds=1", "--workers=1", "--quiet"]
    assert convergence.main([*given, f"--images={tmp_path / 'images'}", f"--plot={tmp_path / 'curves.png'}"]) == 0
    told = capsys.readouterr().out
    assert "jpegs: 1 epochs, 1 seeds" in told
    assert "| dpflow private |" in told
    assert "shared" not in told
