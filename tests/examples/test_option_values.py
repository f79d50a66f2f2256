"""What the examples say of options that cannot be."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from examples import option_values


def test_a_cluster_that_does_not_answer_is_told_of_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(option_values, "ANSWER_S", 0.2)
    with pytest.raises(SystemExit):
        option_values.require_answer(argparse.ArgumentParser(), f"ipc://{tmp_path}/nobody")
    assert "no cluster answers there within 0.2 s; start one by `dpflow up`" in capsys.readouterr().err
