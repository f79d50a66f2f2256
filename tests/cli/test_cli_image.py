"""`dpflow image` writes what an image of workers is built from; nothing is built here, for want of a docker."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import torch_dpflow
from torch_dpflow.cli import image
from torch_dpflow.cli.main import root


def without_options(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("--extra-index-url https://download.pytorch.org/")]


def dpflow(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(root, ["image", *arguments])
    return done.exit_code, done.output


def test_it_has_the_packages_of_this_environment_at_their_versions(tmp_path: Path) -> None:
    out = tmp_path / "docker"
    code, said = dpflow("--out", str(out), "--without", "Pytest_Timeout")
    assert code == 0
    assert "docker build" in said
    lines = (out / "requirements.txt").read_text().splitlines()
    pinned = {one.name: one for one in map(Requirement, without_options(lines)) if not one.url}
    for name in ("numpy", "msgspec", "pyzmq", "cloudpickle"):
        assert pinned[name].specifier.contains(metadata.version(name))
    assert str(pinned["torch"].specifier).startswith(f"=={metadata.version('torch').partition('+')[0]}")
    assert not {"pip", "setuptools", "pytest-timeout", "torch-dpflow"} & pinned.keys()
    dockerfile = (out / "Dockerfile").read_text()
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"FROM python:{version}-slim" in dockerfile
    assert "COPY torch_dpflow torch_dpflow" in dockerfile


def test_a_package_of_a_directory_is_copied_and_can_be_imported(tmp_path: Path) -> None:
    assert dpflow("--out", str(tmp_path))[0] == 0
    assert not [*(tmp_path / "torch_dpflow").rglob("*.pyc")]
    command = f"import torch_dpflow; {image.CHECK.replace('member.warm()', 'member')}; print(torch_dpflow.__file__)"
    ran = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == tmp_path / "torch_dpflow" / "__init__.py"


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("mine")
    code, said = dpflow("--out", str(tmp_path))
    assert (code, (tmp_path / "Dockerfile").read_text()) == (1, "mine")
    assert "has Dockerfile already" in said
    assert dpflow("--out", str(tmp_path), "--force")[0] == 0
    code, said = dpflow("--out", str(tmp_path / "Dockerfile"))  # a file, where a directory should be
    assert code == 1
    assert said == f"Error: {tmp_path}/Dockerfile: File exists\n"


def test_a_package_to_leave_out_has_to_be_there(tmp_path: Path) -> None:
    code, said = dpflow("--out", str(tmp_path / "new"), "--without", "no-such-package")
    assert code == 1
    assert "it is not installed here" in said
    assert not (tmp_path / "new").exists()


def test_a_torch_for_devices_becomes_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        Installed("2.9.1", name="torch"),
        Installed("12.8", name="nvidia-cudnn-cu12"),
        Installed("2.1"),
    ]
    monkeypatch.setattr(metadata, "distributions", lambda: installed)
    found = image.find(set())
    assert found.pinned == ["some-package==2.1", "torch==2.9.1+cpu"]
    assert found.left_out == ["nvidia-cudnn-cu12"]


class Installed(metadata.Distribution):
    def __init__(self, version: str, source: object = None, name: str = "Some.Package") -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "direct_url.json": None if source is None else json.dumps(source),
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(torch_dpflow.__file__)


@pytest.mark.parametrize(
    ("version", "source", "line"),
    [
        ("1.2", None, "some-package==1.2"),
        ("2.6.0+cu124", None, "some-package==2.6.0+cpu"),
        ("1.2", {"url": "https://a.b/c.whl", "archive_info": {}}, "some-package @ https://a.b/c.whl"),
        (
            "1.2",
            {"url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "0ff1ce"}},
            "some-package @ git+https://a.b/c@0ff1ce",
        ),
    ],
)
def test_each_is_found_where_it_was_found_before(
    monkeypatch: pytest.MonkeyPatch, version: str, source: object, line: str
) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda: [Installed(version, source)])
    assert image.find(set()).pinned == [line]
    assert Requirement(line)
