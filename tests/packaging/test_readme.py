"""README.md and docs/: what they show runs as it is printed, and what they link to is there.

The blocks of a page run one after the other as one script, but for those that begin with a file's name, as `# job.py`,
which are scripts of their own.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import pytest

from tests.pages import (
    DOCS,
    HOWTO,
    QUIET,
    RATES,
    ROOT,
    blocks,
    check_trials,
    cluster,
    file_of,
    named,
    run,
    save_scripts,
    side_by_side,
)
from tests.shared_cluster import free_port
from torch_dpflow import JobOptions, LoaderOptions
from torch_dpflow.cli.main import root
from torch_dpflow.datasets.storage import ReadOptions

#: The pages of the site, as its settings find them.
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
#: The scripts of their own, by page: each is run by a test below or in test_platform_pages.py.
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "CONTRIBUTING.md": ("test_my_policy.py",),
    "docs/tutorial.md": ("first.py", "trial.py"),
    "docs/tutorial-ray.md": ("actors.py",),
    "docs/howto/resume.md": ("train.py",),
    "docs/howto/ddp.md": ("ddp.py", "mesh.py"),
    "docs/howto/lightning.md": ("with_lightning.py",),
    "docs/howto/accelerate.md": ("with_accelerate.py",),
    "docs/howto/sharing.md": ("job.py", "search.py"),
    "docs/howto/overlapping-data.md": ("folds.py",),
    "docs/howto/platforms.md": ("elsewhere.py",),
    "docs/howto/ray.md": ("on_ray.py",),
    "docs/howto/kubernetes.md": ("on_kubernetes.py",),
    "docs/howto/functions.md": ("on_functions.py",),
}
OPTIONS: Mapping[str, Callable[..., object]] = {
    "JobOptions": JobOptions,
    "LoaderOptions": LoaderOptions,
    "ReadOptions": ReadOptions,
}
#: Runs pages one after the other, so that torch is imported once.
RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print("--", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


def test_every_script_of_a_page_is_run_by_a_test() -> None:
    found = {
        named(page): tuple(filter(None, map(file_of, blocks(page, "python"))))
        for page in PAGES
        if any(map(file_of, blocks(page, "python")))
    }
    assert found == SCRIPTS


def test_a_contract_suite_runs_in_another_repository(tmp_path: Path) -> None:
    save_scripts(ROOT / "CONTRIBUTING.md", tmp_path)
    # Without the search for histories, which tests of policies make.
    command = ("-m", "pytest", "-q", "-k", "not history", "test_my_policy.py")
    assert re.search(r"^\d+ passed", run(*command, directory=tmp_path), re.MULTILINE)


def test_the_blocks_of_each_page_run_as_one_script(tmp_path: Path) -> None:
    pages = []
    for page in PAGES:
        if together := [block for block in blocks(page, "python") if not file_of(block)]:
            pages.append(tmp_path / f"{named(page).replace('/', '-')}.py")
            pages[-1].write_text("\n".join(together), "utf-8")
    save_scripts(HOWTO / "resume.md", tmp_path)
    paths = [*map(str, pages), "train.py", "train.py"]
    out = run(*QUIET, "-c", RUN_ALL, *paths, directory=tmp_path)
    for printed in (
        "1 worker was replaced",
        "160 40 torch.float32 torch.int64",
        "-- train.py\n60 batches were read\n",
        "-- train.py\nresumed in epoch 2\n0 batches were read\n",
    ):
        assert printed in out


@pytest.mark.slow
def test_the_script_for_ddp_runs_as_the_only_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    save_scripts(HOWTO / "ddp.md", tmp_path)
    run("ddp.py", directory=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "ranks"), [("ddp.py", "2"), ("mesh.py", "4")])
def test_the_scripts_for_ddp_run_under_torchrun(tmp_path: Path, script: str, ranks: str) -> None:
    """Each process imports torch; tests of the samplers have ranks that one process forks."""
    save_scripts(HOWTO / "ddp.md", tmp_path)
    run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, script),
        directory=tmp_path,
    )


def test_the_script_for_several_jobs_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    save_scripts(HOWTO / "sharing.md", tmp_path)
    with cluster(tmp_path, monkeypatch, eventually):
        told = side_by_side(tmp_path, ["job.py"], ["job.py"], ["search.py", "--lr", "0.1"], ["search.py", "--lr", "1"])[
            :2
        ]
    served, loaded = max([int(number) for number in re.findall(r"\d+", out)] for out in told)
    assert served == 4000
    assert loaded < 1500


def test_folds_of_one_dataset_share_its_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    save_scripts(HOWTO / "overlapping-data.md", tmp_path)
    with cluster(tmp_path, monkeypatch, eventually):
        told = side_by_side(tmp_path, ["folds.py", "0"], ["folds.py", "1"])
    served, loaded = max([int(number) for number in re.findall(r"\d+", out)] for out in told)
    assert served == 1800
    assert loaded < 1200


@pytest.mark.slow
def test_the_tutorial_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    save_scripts(DOCS / "tutorial.md", tmp_path)
    out = run(*QUIET, "first.py", directory=tmp_path)
    assert "3,000 samples in 60 batches, 3 epochs" in out
    assert re.search(r"^Change: ", out, re.MULTILINE)
    with cluster(tmp_path, monkeypatch, eventually, path=(".",)):
        check_trials(side_by_side(tmp_path, *(["trial.py", rate] for rate in RATES)))
        assert "pictures/train" in run("-m", "torch_dpflow.cli", "status", directory=tmp_path)
        scale = ("flow", "scale", "pictures/train", "--workers", "1")
        assert "as many shards as needed and 1 worker;" in run("-m", "torch_dpflow.cli", *scale, directory=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "page", "printed"),
    [("lightning", "lightning", "33 batches were left"), ("accelerate", "accelerate", "40 batches")],
)
def test_the_script_for_a_library_runs(library: str, page: str, printed: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    save_scripts(HOWTO / f"{page}.md", tmp_path)
    assert printed in run(f"with_{page}.py", directory=tmp_path)


def test_every_page_of_the_site_is_in_its_contents() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    listed = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^(?:[^:\n].* <)?([\w./-]+)>?$", "".join(listed), re.MULTILINE)
    assert {(DOCS / f"{entry}.md").resolve() for entry in entries} == {*PAGES} - {DOCS / "index.md"}


def test_links_lead_to_files_and_headings_that_are_there() -> None:
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            path, _, heading = target.partition("#")
            if "://" in path:
                continue
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (heading and heading not in headings(there)):
                missing.append((named(page), target))
    assert not missing


@functools.cache
def headings(page: Path) -> set[str]:
    """The anchors of a page, as code hosts make them from its headings."""
    found = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_commands_name_targets_and_modules_that_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        assert set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets, page
        for module in set(re.findall(r"-m ((?:benchmarks|examples)\.\w+)", text)):
            if not module.endswith(".NAME"):
                parts = ROOT.joinpath(*module.split("."))
                assert parts.with_suffix(".py").is_file() or (parts / "__main__.py").is_file(), (page, module)


def commands(text: str) -> set[str]:
    """What follows `dpflow` in commands of a page: after a prompt, or as code within a sentence."""
    joined = text.replace("\\\n", " ")
    prompted = re.findall(r"^\S*\$ (?:.*[ /])?dpflow ([a-z][^\n#|&;`]*)", joined, re.MULTILINE)
    quoted = re.findall(r"`(?:\S*/)?dpflow ([a-z][^`]*)`", joined)
    return {" ".join(one.split()) for one in (*prompted, *quoted)}


def unknown_in(line: str) -> str:
    """The first word of a command that is neither a command nor an option; empty: there is none."""
    command: click.Command = root
    words = line.split()
    while words and isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0].rstrip(","))
        if found is None:
            return words[0]
        command, words = found, [] if words[0].endswith(",") else words[1:]  # a list of commands
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    given = [word.partition("=")[0].rstrip(",.)]") for word in words if word.startswith("-")]
    return next((one for one in given if one not in options), "")


def test_commands_of_dpflow_are_there_with_their_options() -> None:
    found = {(named(page), line): unknown_in(line) for page in PAGES for line in commands(page.read_text("utf-8"))}
    assert {where: unknown for where, unknown in found.items() if unknown} == {}


def unknown_options(text: str) -> list[str]:
    """Return the options of `JobOptions(...)` and the like that a page names and that are not there."""
    return [
        f"{name}({option}=)"
        for name, arguments in re.findall(rf"\b({'|'.join(OPTIONS)})\(([^()]*)", text)
        for option in re.findall(r"(?:^|,\s)\s*(\w+)=", arguments)
        if option not in inspect.signature(OPTIONS[name]).parameters
    ]


def test_options_of_a_page_are_there() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    assert [(named(page), one) for page in pages for one in unknown_options(page.read_text("utf-8"))] == []


def test_unknown_options_of_a_page_are_found() -> None:
    text = "`JobOptions(name=..., nmae=1)` and `LoaderOptions(listen='', lisen=)`"
    assert unknown_options(text) == ["JobOptions(nmae=)", "LoaderOptions(lisen=)"]


def test_unknown_commands_and_options_of_a_page_are_found() -> None:
    text = "$ .venv/bin/dpflow up --wb HOST:PORT \\\n   --workers 2  # --x\n"
    text += "and `dpflow flow scal a`, `dpflow status --json`\n"
    assert sorted(map(unknown_in, commands(text))) == ["", "--wb", "scal"]
