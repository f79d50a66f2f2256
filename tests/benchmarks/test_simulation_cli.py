"""The simulator's command line, called in this process."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.later import Later

cli, plots = Later("benchmarks.simulation.cli"), Later("benchmarks.simulation.plots")

SMALL = ["--simulated", "200", "--seeds", "1", "--samples", "20000", "--sample-size", "100kB"]


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens fonts for its first figure and keeps the files open."""
    path = tmp_path_factory.mktemp("fonts") / "figure.png"
    plots.p_values(path, "warm", {"panel": {"p": np.array([0.1, 1.0])}}, level=0.05)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_a_question_is_answered_with_bounds_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "answer.png"
    out = run(capsys, *SMALL, "--capacity", "1GB", "--starts", "0,0.5", "--speeds", "2,1", "--plot", str(picture))
    assert "20,000 samples" in out
    assert "1 : 100" in out
    assert "shared-log" in out
    assert "50.0%" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_one_object_for_each_sampler_policy_and_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--capacity", "200MB,1GB", "--sampler", "coordl,joader", "--policy", "lru,alsd"]
    lines = [json.loads(line) for line in run(capsys, *SMALL, *options).splitlines()]
    assert len(lines) == 8
    for line in lines:
        [hit], [best], [bound] = (line[f"{k}_percent"] for k in ("hit_rate", "optimum", "upper_bound"))
        assert 0 <= hit <= best + 1e-9 <= bound + 2e-9
        assert line["decodes_per_sample"] == pytest.approx(1 - hit / 100)
        assert line["machine"]["cores"] >= 1


def test_named_scenarios_take_capacities_as_shares(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--json", *SMALL, "--scenario", "speed2,windows", "--capacity", "5%,25%")
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["scenario"] for line in lines} == {"speed2", "windows"}
    assert {line["capacity_percent"] for line in lines} == {5, 25}
    for line in lines:
        if line["capacity_percent"] == 5:
            assert line["overlap_percent"] == line["hit_rate_percent"]


def test_uniformity_prints_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    options = [
        "--epochs",
        "5",
        "--sampler",
        "independent",
        "--scenario",
        "same1,core",
        "--plot",
        str(picture),
    ]
    out = run(capsys, "--figure", "uniformity", *options)
    assert "same1" in out
    assert "core" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "magic"], "magic"),
        (["--policy", "fifo"], "allowed are"),
        (["--capacity", "12XB"], "12XB"),
        (["--capacity", "120%"], "at most 100%"),
        (["--starts", "0,1", "--speeds", "1"], "2 starts and 1 speeds"),
        (["--speeds", "1,-1"], "speed"),
        (["--independence", "2"], "from 0 to 1"),
        (["--seeds", "0"], "at least 1"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*SMALL, *arguments])
    assert message in capsys.readouterr().err
