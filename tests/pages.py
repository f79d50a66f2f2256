"""Pages of the documentation, and how what they show is run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.new_process import Interpreter

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOWTO = DOCS / "howto"
#: Nothing warns but torch itself, of more workers than a small machine has processors.
QUIET = ["-W", "error", "-W", "ignore:This DataLoader will create:UserWarning"]
#: Of the four trials of the tutorial.
RATES = ("0.0001", "0.001", "0.01", "0.1")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def file_of(block: str) -> str:
    """The name that a block begins with; empty if it is a part of its page's script."""
    found = re.match(r"# (\w+\.py)\n", block)
    return found[1] if found else ""


def save_scripts(page: Path, directory: Path) -> None:
    """Save the scripts of a page under their names, as a reader does."""
    for block in blocks(page, "python"):
        if name := file_of(block):
            (directory / name).write_text(block, "utf-8")


def start(*arguments: str, directory: Path, path: tuple[str, ...] = ()) -> Interpreter:
    """A Python process in a directory of its own. path: what a page has in PYTHONPATH."""
    # torchrun leaves a directory for logs in TMPDIR.
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *path]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(directory),
    }
    return Interpreter([sys.executable, *arguments], preloaded=not path, fork_server=True, cwd=directory, env=env)


def run(*arguments: str, directory: Path) -> str:
    """The same, waited for; what it has printed."""
    with start(*arguments, directory=directory) as process:
        try:
            out, said = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == 0, out + said
    return out


@contextmanager
def cluster(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    *options: str,
    path: tuple[str, ...] = (),
) -> Iterator[None]:
    """`dpflow up`, in its own directory for the connection file, where jobs look for it."""
    monkeypatch.delenv("DPFLOW_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    # Not by -m, which would have the directory's modules found.
    command = str(Path(sys.executable).with_name("dpflow"))
    with start(command, "up", *options, directory=directory, path=path) as node:
        try:
            eventually(lambda: list(directory.glob("dpflow-connection-*")), what="the connection file")
            yield
        finally:
            node.terminate()
        _, said = node.communicate(timeout=250)
        assert node.returncode == 0, said


def side_by_side(directory: Path, *commands: list[str]) -> list[str]:
    """Run these at once; what each has printed."""
    processes = [start(*command, directory=directory) for command in commands]
    try:
        told = [process.communicate(timeout=250) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, said) in zip(processes, told, strict=True):
        assert process.returncode == 0, out + said
    return [out for out, _ in told]


def check_trials(told: list[str]) -> None:
    """The one that ends last has seen what all four were given."""
    served, loaded = max([int(number) for number in out.splitlines()[-1].split() if number.isdigit()] for out in told)
    assert served == 12_000
    assert loaded < 1500
