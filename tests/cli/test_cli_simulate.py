"""`dpflow simulate` is the simulator of the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import torch_dpflow
from torch_dpflow.cli.main import root


def test_it_answers_as_the_simulator_does() -> None:
    arguments = ["--samples", "400", "--simulated", "400", "--capacity", "50%", "--seeds", "1", "--json"]
    done = CliRunner().invoke(root, ["simulate", *arguments], prog_name="dpflow")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["sampler"] for record in records} >= {"shared-log", "independent"}


def test_without_the_repository_it_says_where_to_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dpflow, "__file__", str(tmp_path / "torch_dpflow" / "__init__.py"))
    done = CliRunner().invoke(root, ["simulate"], prog_name="dpflow")
    assert done.exit_code == 1
    assert "clone the repository" in done.output
