"""`make test-versions`: what it says, and by what it is known, where it has tested nothing."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tools import test_versions as tool


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    return tmp_path


def test_a_second_run_leaves_the_environments_of_the_first_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tool.main([]) == 1
    assert f"another run uses {folder}" in capsys.readouterr().out


def test_what_this_machine_lacks_is_said_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PYTHONS", ("2.0", "2.1"))
    assert tool.main([]) == 1
    said = capsys.readouterr().out
    assert "no Python 2.0 here" in said
    assert "oldest: not tested: there is no Python 2.0" in said
    assert "newest: not tested" in said
