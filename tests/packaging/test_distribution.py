"""The wheel and the source distribution: they build without a network, and hold the library and nothing else."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import torch_dpflow

ROOT = Path(__file__).resolve().parents[2]
#: The build back end writes beside what it builds, so it gets a copy.
NEEDED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
BUILD = """
from setuptools import build_meta
build_meta.build_wheel("dist")
build_meta.build_sdist("dist")
build_meta.build_editable("editable")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packed, with a wheel and a source distribution in dist/."""
    copy = tmp_path_factory.mktemp("source")
    (copy / "editable").mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "torch_dpflow", copy / "torch_dpflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return copy


def modules(built: Path) -> set[str]:
    """Every module of the library, by its path."""
    return {path.relative_to(built).as_posix() for path in (built / "torch_dpflow").rglob("*.py")}


def test_the_wheel_holds_every_module_and_the_mark_of_its_types(built: Path) -> None:
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules(built) | {"torch_dpflow/py.typed"}


def test_the_metadata_tells_what_a_user_needs(built: Path) -> None:
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Name"] == "torch_dpflow"
    assert metadata["Version"] == torch_dpflow.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert "torch>=2.6" in metadata.get_all("Requires-Dist")
    assert "DPFlowDataLoader" in str(metadata.get_payload())
    assert "dpflow = torch_dpflow.cli:main" in entry_points


def test_no_extra_brings_a_torch(built: Path) -> None:
    """torchvision asks for one exact torch: pip would put it in the place of the one that is there."""
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    asked = [re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" in line]
    assert "torchdata" in asked
    assert not {"torch", "torchvision", "torchaudio"} & set(asked)


def test_an_editable_install_is_a_path(built: Path) -> None:
    """mypy and editors follow one; a finder they do not see."""
    (wheel,) = (built / "editable").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert archive.read(name).decode().split() == [str(built)]


def test_the_source_distribution_builds_the_same(built: Path) -> None:
    (source,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(NEEDED) <= names
    assert modules(built) <= names
