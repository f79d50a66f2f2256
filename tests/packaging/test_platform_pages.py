"""What the pages on platforms show runs as it is printed: on a Ray of this host, and against doubles of the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages import (
    DOCS,
    HOWTO,
    QUIET,
    RATES,
    blocks,
    check_trials,
    cluster,
    run,
    save_scripts,
    side_by_side,
)
from tests.remote.launchers.function_doubles import function_double
from tests.remote.launchers.kube_server import kube_server
from tests.remote.launchers.local_ray import needs_ray, ray_of, start_node


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Instead of the check of all tests: Ray and the doubles keep threads and sockets in this process for a while."""


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
@pytest.mark.parametrize(("platform", "client"), [("fc", "alibabacloud_fc20230330"), ("lambda", "awslambdaric")])
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


def test_the_unit_for_systemd_is_valid(tmp_path: Path) -> None:
    """And systemd creates the directory of the state: a new user has no `~/.local/state`."""
    (unit,) = blocks(HOWTO / "operate.md", "ini")
    assert "--state %S/dpflow/" in unit
    assert "StateDirectory=dpflow\n" in unit
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")
    path = tmp_path / "dpflow.service"
    path.write_text(unit.replace("/srv/env/bin/dpflow", sys.executable), "utf-8")
    found = subprocess.run(
        [analyze, "verify", "--user", path],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_the_script_for_slurm_is_valid(tmp_path: Path) -> None:
    """As many tasks as hosts: without `--ntasks`, srun takes the job's, and starts two nodes on one host."""
    (script,) = blocks(HOWTO / "operate.md", "bash")
    assert "--nodes=4 --ntasks-per-node=1" in script
    assert "srun --overlap --nodes=3 --ntasks=3 --exclude=$(hostname) dpflow node" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
