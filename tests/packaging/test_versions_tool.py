"""Versions of Python: what `make` says of one that it cannot use, and `make test-versions` where it tested nothing."""

from __future__ import annotations

import ast
import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import test_versions as tool


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    return tmp_path


def make(folder: Path, interpreter: str) -> str:
    """What `make` says as it sets up an environment with this script as its Python; it fails."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{interpreter}")
    python.chmod(0o755)
    command = ["make", f"VENV={folder}", f"PYTHON={python}", f"{folder}/.installed"]
    done = subprocess.run(command, cwd=tool.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert not (folder / ".installed").exists()
    return done.stderr


def test_a_python_that_is_too_old_is_refused_before_anything_is_installed(folder: Path) -> None:
    old = "import sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18 (main)'; exec(sys.argv[1])"
    said = make(folder, f'[ "$1" = -c ] && exec {sys.executable} -c "{old}" "$2"\necho $* >&2\n')
    assert "Python 3.10 or later is needed, and this is 3.9.18: name another" in said
    assert "pip" not in said


def test_a_python_without_a_torch_is_said_to_be_that(folder: Path) -> None:
    said = make(folder, f'[ "$2" = pip ] || exec {sys.executable} "$@"\ncase "$*" in *torch*) exit 1;; esac\n')
    assert f"torch cannot be installed for Python {sys.version.split()[0]}: if pip found no matching" in said


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


def imported_by(path: Path, seen: set[Path]) -> set[str]:
    """The packages that a module of the tests imports at its beginning, and those that its helpers import so."""
    if path in seen:
        return set()
    seen.add(path)
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        else:
            continue
        for name in names:
            file = tool.ROOT.joinpath(*name.split(".")).with_suffix(".py")
            found |= imported_by(file, seen) if file.is_file() and name.startswith("tests.") else {name.split(".")[0]}
    return found


def test_what_runs_at_both_ends_imports_what_is_installed_there() -> None:
    roots = [tool.ROOT / "tests" / "conftest.py"]
    for place in tool.CONTRACTS:
        at = tool.ROOT / place
        roots += [at] if at.is_file() else sorted(at.rglob("*.py"))
    imported = set[str]().union(*(imported_by(root, set()) for root in roots)) - sys.stdlib_module_names
    bounds, _ = tool._requirements()
    installed = {re.split(r"[>=<]", one)[0].replace("-", "_") for one in (*tool.TOOLS, *bounds)}
    modules = {"pillow": "PIL", "pyzmq": "zmq", "python_snappy": "snappy"}
    here = {modules.get(one, one) for one in installed} | {"_pytest", "tests", "torch_dpflow"}
    assert "hypothesis" in imported
    assert imported - here == set()
