"""README.md and docs/: what they show runs as it is printed, and what they link to is there.

The blocks of a page run one after the other as one script, but for those that are scripts of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.shared_cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
README = ROOT / "README.md"
#: By what a script of its own is known: one for torchrun, a job that reads from a cluster, and one for Ray.
RANKS, JOB, RAY = "init_process_group", "flow=", "platform=Ray("


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def start(*arguments: str, directory: Path) -> subprocess.Popen[str]:
    """A Python process in a directory of its own."""
    # torchrun leaves a directory for logs in TMPDIR.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=directory, env=env, stdout=PIPE, stderr=PIPE, text=True
    )


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The same, waited for."""
    with start(*arguments, directory=directory) as process:
        try:
            out, said = process.communicate(timeout=250)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, said)


def script(page: Path, directory: Path) -> Path:
    """All blocks of a page as one script, as the page says that they run."""
    together = [
        block for block in blocks(page, "python") if not any(mark in block for mark in (RANKS, JOB, RAY))
    ]
    path = directory / "page.py"
    path.write_text("\n".join(together), "utf-8")
    return path


def own_script(mark: str, directory: Path) -> str:
    """The one block of README.md that has this mark, as a file."""
    (block,) = [block for block in blocks(README, "python") if mark in block]
    path = directory / "own.py"
    path.write_text(block, "utf-8")
    return str(path)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "flows.md"], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_as_one_script(page: Path, tmp_path: Path) -> None:
    # Nothing warns but torch itself, of more workers than a small machine has processors.
    quiet = ["-W", "error", "-W", "ignore:This DataLoader will create:UserWarning"]
    done = run(*quiet, str(script(page, tmp_path)), directory=tmp_path)
    assert done.returncode == 0, done.stderr
    if page == README:
        assert "1 worker was replaced" in done.stdout


def test_the_block_for_ddp_runs_as_the_only_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    done = run(own_script(RANKS, tmp_path), directory=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_block_for_ddp_runs_under_torchrun(tmp_path: Path) -> None:
    """Three processes import torch; `tests/integration/test_distributed.py` has two ranks too."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*torchrun, own_script(RANKS, tmp_path), directory=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_block_for_several_jobs_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.delenv("DPFLOW_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with start("-m", "torch_dpflow.cli", "up", directory=tmp_path) as cluster:
        try:
            eventually(lambda: list(tmp_path.glob("dpflow-connection-*")), what="the connection file")
            job = own_script(JOB, tmp_path)
            with start(job, directory=tmp_path) as one, start(job, directory=tmp_path) as other:
                told: list[list[int]] = []
                for process in (one, other):
                    out, said = process.communicate(timeout=250)
                    assert process.returncode == 0, said
                    told.append([int(number) for number in re.findall(r"\d+", out)])
            served, loaded = max(told)
            assert served == 4000
            assert loaded < 1500
        finally:
            cluster.terminate()
        _, said = cluster.communicate(timeout=250)
        assert cluster.returncode == 0, said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        path, _, heading = target.partition("#")
        if "://" in path:
            continue
        there = page.parent / path if path else page
        if not there.exists() or (heading and heading not in headings(there)):
            missing.append(target)
    assert not missing


def headings(page: Path) -> set[str]:
    """The anchors of a page, as code hosts make them from its headings."""
    found = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_targets_and_modules_that_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for module in set(re.findall(r"-m ((?:benchmarks|examples)\.\w+)", text)):
        if not module.endswith(".NAME"):
            parts = ROOT.joinpath(*module.split("."))
            assert parts.with_suffix(".py").is_file() or (parts / "__main__.py").is_file(), module
