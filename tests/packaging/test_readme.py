"""README.md and docs/: what they show runs as it is printed, and what they link to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
#: Needs a process group, so it is a script of its own, started by torchrun.
NEEDS_RANKS = "init_process_group"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A Python process in a directory of its own."""
    # torchrun leaves a directory for logs in TMPDIR.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=env, capture_output=True, text=True, timeout=150
    )


def script(page: Path, directory: Path) -> Path:
    """All blocks of a page as one script, as the page says that they run."""
    path = directory / "page.py"
    path.write_text("\n".join(block for block in blocks(page, "python") if NEEDS_RANKS not in block), "utf-8")
    return path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_blocks_of_a_page_run_as_one_script(page: Path, tmp_path: Path) -> None:
    done = run(str(script(page, tmp_path)), directory=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_block_for_ddp_runs_under_torchrun(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "README.md", "python") if NEEDS_RANKS in block]
    (tmp_path / "ddp.py").write_text(block, "utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*torchrun, "ddp.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr


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
