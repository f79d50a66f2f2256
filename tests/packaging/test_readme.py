"""README.md and docs/: what they show runs as it is printed, and what they link to is there.

The blocks of a page run one after the other as one script, but for those that begin with a file's name, as `# job.py`,
which are scripts of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.platforms.function_doubles import function_double
from tests.platforms.kube_server import kube_server
from tests.platforms.local_ray import needs_ray, ray_of, start_node
from tests.shared_cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: The pages of the site, as its settings find them.
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
HOWTO = DOCS / "howto"
#: Nothing warns but torch itself, of more workers than a small machine has processors.
QUIET = ["-W", "error", "-W", "ignore:This DataLoader will create:UserWarning"]
#: Which script of its own is run by which test below.
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "docs/tutorial.md": ("first.py", "trial.py"),
    "docs/tutorial-ray.md": ("actors.py",),
    "docs/howto/resume.md": ("train.py",),
    "docs/howto/ddp.md": ("ddp.py",),
    "docs/howto/lightning.md": ("with_lightning.py",),
    "docs/howto/accelerate.md": ("with_accelerate.py",),
    "docs/howto/sharing.md": ("job.py",),
    "docs/howto/platforms.md": ("elsewhere.py",),
    "docs/howto/ray.md": ("on_ray.py",),
    "docs/howto/kubernetes.md": ("on_kubernetes.py",),
    "docs/howto/functions.md": ("on_functions.py",),
}
#: Runs pages one after the other, so that torch is imported once.
RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print("--", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


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


def start(*arguments: str, directory: Path) -> subprocess.Popen[str]:
    """A Python process in a directory of its own."""
    # torchrun leaves a directory for logs in TMPDIR.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=directory, env=env, stdout=PIPE, stderr=PIPE, text=True
    )


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
    directory: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None], *options: str
) -> Iterator[None]:
    """`dpflow up`, in its own directory for the connection file, where jobs look for it."""
    monkeypatch.delenv("DPFLOW_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with start("-m", "torch_dpflow.cli", "up", *options, directory=directory) as node:
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


def test_every_script_of_a_page_is_run_by_a_test() -> None:
    found = {
        named(page): tuple(filter(None, map(file_of, blocks(page, "python"))))
        for page in PAGES
        if any(map(file_of, blocks(page, "python")))
    }
    assert found == SCRIPTS


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


def test_the_script_for_ddp_runs_as_the_only_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    save_scripts(HOWTO / "ddp.md", tmp_path)
    run("ddp.py", directory=tmp_path)


@pytest.mark.slow
def test_the_script_for_ddp_runs_under_torchrun(tmp_path: Path) -> None:
    """Three processes import torch; `tests/integration/test_distributed.py` has two ranks too."""
    save_scripts(HOWTO / "ddp.md", tmp_path)
    run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py"),
        directory=tmp_path,
    )


def test_the_script_for_several_jobs_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    save_scripts(HOWTO / "sharing.md", tmp_path)
    with cluster(tmp_path, monkeypatch, eventually):
        told = side_by_side(tmp_path, ["job.py"], ["job.py"])
    served, loaded = max([int(number) for number in re.findall(r"\d+", out)] for out in told)
    assert served == 4000
    assert loaded < 1500


RATES = ("0.0001", "0.001", "0.01", "0.1")


def check_trials(told: list[str]) -> None:
    """The one that ends last has seen what all four were given."""
    served, loaded = max(
        [int(number) for number in out.splitlines()[-1].split() if number.isdigit()] for out in told
    )
    assert served == 12_000
    assert loaded < 1500


@pytest.mark.slow
def test_the_tutorial_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    save_scripts(DOCS / "tutorial.md", tmp_path)
    out = run(*QUIET, "first.py", directory=tmp_path)
    assert "3,000 samples in 60 batches, 3 epochs" in out
    assert re.search(r"^Change: ", out, re.MULTILINE)
    with cluster(tmp_path, monkeypatch, eventually):
        check_trials(side_by_side(tmp_path, *(["trial.py", rate] for rate in RATES)))
        assert "pictures/train" in run("-m", "torch_dpflow.cli", "status", directory=tmp_path)


@pytest.mark.slow
@needs_ray
def test_the_tutorial_on_ray_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    for page in (DOCS / "tutorial.md", DOCS / "tutorial-ray.md", HOWTO / "ray.md"):
        save_scripts(page, tmp_path)
    with ray_of(start_node(6.0)):
        assert run("on_ray.py", directory=tmp_path) == "10 batches\n"
        assert run("actors.py", directory=tmp_path) == "equal\n"
        run("-m", "torch_dpflow.cli", "check", "ray", directory=tmp_path)
        monkeypatch.setenv("DPFLOW_PLATFORM_RAY_CPUS", "0.5")
        with cluster(tmp_path, monkeypatch, eventually, "--platform", "ray"):
            check_trials(side_by_side(tmp_path, *(["trial.py", rate] for rate in RATES)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "page", "printed"),
    [("lightning", "lightning", "33 batches were left"), ("accelerate", "accelerate", "40 batches")],
)
def test_the_script_for_a_library_runs(library: str, page: str, printed: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    save_scripts(HOWTO / f"{page}.md", tmp_path)
    assert printed in run(f"with_{page}.py", directory=tmp_path)


@pytest.mark.slow
def test_the_script_for_platforms_runs_in_processes(tmp_path: Path) -> None:
    save_scripts(HOWTO / "platforms.md", tmp_path)
    assert run(*QUIET, "elsewhere.py", directory=tmp_path) == "20 batches\n"


@pytest.mark.slow
def test_the_script_for_kubernetes_runs_with_the_page_s_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the double of its API server, whose pods are processes of this host."""
    pytest.importorskip("kubernetes", reason="pip install 'torch_dpflow[kubernetes]'")
    save_scripts(HOWTO / "kubernetes.md", tmp_path)
    (settings,) = blocks(HOWTO / "kubernetes.md", "toml")
    (tmp_path / "dpflow.toml").write_text(settings, "utf-8")
    with kube_server(start_s=0.0) as server:
        (tmp_path / "kubeconfig").write_text(json.dumps(server.kubeconfig()))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        run("-m", "torch_dpflow.cli", "check", "kubernetes", directory=tmp_path)
        assert run("on_kubernetes.py", directory=tmp_path) == "20 batches\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "client"), [("fc", "alibabacloud_fc20230330"), ("lambda", "awslambdaric")]
)
def test_the_script_for_functions_runs(
    platform: str, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the doubles of their control planes."""
    pytest.importorskip(client, reason="pip install 'torch_dpflow[test]'")
    save_scripts(HOWTO / "functions.md", tmp_path)
    script = tmp_path / "on_functions.py"
    script.write_text(script.read_text("utf-8").replace('platform="fc"', f'platform="{platform}"'), "utf-8")
    with function_double(platform) as double:
        (tmp_path / "dpflow.toml").write_text(double.toml(), "utf-8")
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        assert run("on_functions.py", directory=tmp_path) == "20 batches\n"


def test_every_page_of_the_site_is_in_its_contents() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    listed = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^(?:[^:\n].* <)?([\w./-]+)>?$", "".join(listed), re.MULTILINE)
    assert {(DOCS / f"{entry}.md").resolve() for entry in entries} == {*PAGES} - {DOCS / "index.md"}


@pytest.mark.parametrize("page", PAGES, ids=named)
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


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_name_targets_and_modules_that_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for module in set(re.findall(r"-m ((?:benchmarks|examples)\.\w+)", text)):
        if not module.endswith(".NAME"):
            parts = ROOT.joinpath(*module.split("."))
            assert parts.with_suffix(".py").is_file() or (parts / "__main__.py").is_file(), module
