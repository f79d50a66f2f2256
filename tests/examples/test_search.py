"""The search of four trials, in small: they share one loading, in a cluster of their own or in one that runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import natural_images
from examples.cluster import found_or_started, loads
from examples.option_values import require_answer
from tests.later import Later
from tests.shared_cluster import TestCluster

search = Later("examples.search")
SMALL = ("--train=32", "--val=8", "--epochs=2", "--workers=2", "--lr=0.01,0.1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "data"
    images = natural_images.Specification(classes=search.CLASSES, train=32, val=8)
    natural_images.generate(folder, images, processes=1, progress=False)
    return folder


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster runs, as far as anybody here can see."""
    monkeypatch.delenv("DPFLOW_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    started = TestCluster.start(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("nowhere")
def test_trials_share_the_loading_of_a_cluster_that_is_started_for_them(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search.main([f"--data={data}", *SMALL]) == 0
    printed = capsys.readouterr().out
    decodes, samples = told(printed)
    assert samples == 2 * 2 * 32
    assert 2 * 32 <= decodes <= samples  # as much as the trials happen to run side by side
    assert all(heading in printed for heading in ("learning rate", "accuracy", "stall", "decodes/sample"))


def test_a_cluster_that_runs_is_taken(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFLOW_ADDRESS", cluster.address)
    with found_or_started("auto") as address:
        assert address == "auto"
        assert loads(address) == 0
    require_answer(argparse.ArgumentParser(), cluster.address)


@pytest.mark.slow
def test_a_trial_learns_with_either_loader(data: Path, cluster: TestCluster) -> None:
    trials = [
        search.Trial(number=0, lr=0.05, loader=loader, address=cluster.address, data=data, epochs=1, workers=1)
        for loader in search.LOADERS
    ]
    outcomes = [search.run(trial) for trial in trials]
    for outcome in outcomes:
        assert outcome.samples == 32
        assert 0 <= outcome.accuracy <= 1
        assert 0 < outcome.stall_share <= 1
    assert "best: trial 0" in str(search.results(outcomes, 64).caption)


def test_a_named_cluster_is_not_looked_for() -> None:
    with found_or_started("/nowhere/connection") as address:
        assert address == "/nowhere/connection"


def told(printed: str) -> tuple[int, int]:
    """Decodes and samples in the table's caption."""
    caption = " ".join(printed.split())
    found = re.search(r"([\d,]+) images were decoded for the ([\d,]+) that were trained on", caption)
    assert found, printed
    decodes, samples = (int(number.replace(",", "")) for number in found.groups())
    return decodes, samples
