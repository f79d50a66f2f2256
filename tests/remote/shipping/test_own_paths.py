"""Which files are the user's own, also by links."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torch_dpflow.remote.shipping.modules import is_own_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Own and installed modules, and links to both and to the standard library."""
    for name in ("src", "site-packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").touch()
    for link, target in (
        ("own", tmp_path / "src"),
        ("installed", tmp_path / "site-packages"),
        ("standard", Path(os.__file__).parent),
        ("src/installed.py", tmp_path / "site-packages/module.py"),
        ("src/standard.py", Path(json.__file__)),
        ("src/own.py", tmp_path / "src/module.py"),
        ("site-packages/own", tmp_path / "src"),
    ):
        (tmp_path / link).symlink_to(target)
    return tmp_path


@pytest.mark.parametrize("file", ["src/module.py", "src/missing.py", "own/module.py", "src/own.py"])
def test_an_own_file(folder: Path, file: str) -> None:
    assert is_own_path(str(folder / file))


@pytest.mark.parametrize(
    "file",
    [
        "site-packages/module.py",
        "site-packages/own/module.py",
        "installed/module.py",
        "src/installed.py",
        "standard/json/__init__.py",
        "src/standard.py",
        json.__file__,
    ],
)
def test_an_installed_file(folder: Path, file: str) -> None:
    assert not is_own_path(str(folder / file))


def test_a_relative_path_is_of_the_folder_that_is_current(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, own in (("src", True), ("installed", False), ("own", True)):
        monkeypatch.chdir(folder / place)
        assert is_own_path("module.py") is own
