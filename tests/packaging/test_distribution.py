"""The wheel and the source distribution: they build without a network, and hold the library and nothing else."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import torch_dpflow
from tests.new_process import run_interpreter
from tools.release_check import stated_versions
from torch_dpflow.remote.shipping.compatibility import distributions_of_modules

ROOT = Path(__file__).resolve().parents[2]
#: The build back end writes beside what it builds, so it gets a copy.
NEEDED = (
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "CHANGELOG.md",
    "CITATION.cff",
    "tools/build_backend.py",
)
BUILD = """
import sys
sys.path.insert(0, "tools")
import build_backend as build_meta
build_meta.build_wheel("dist")
build_meta.build_sdist("dist")
build_meta.build_editable("editable")
"""

#: Beside the library in its repository, and never in the wheel.
BESIDE = ("benchmarks", "examples", "tests", "tools")
#: What needs an extra: the command line, tables of samples, the live page and nodes of torchdata. All else is
#: there without.
WITH_EXTRAS = (
    "torch_dpflow.cli.",
    "torch_dpflow.datasets.importers.table_values",
    "torch_dpflow.cluster.monitoring.page_server",
    "torch_dpflow.nodes",
    "torch_dpflow.vision",
)
#: Imports every module of the wheel in the working directory without the packages that it is told to do without.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
absent = json.loads(sys.argv[1])
for name in [*sys.modules]:  # of the process that this one is forked from
    if name.partition(".")[0] in {"torch_dpflow", *absent}:
        del sys.modules[name]
for package in absent:
    sys.modules[package] = None
import torch_dpflow
assert torch_dpflow.__file__.startswith(sys.argv[2]), torch_dpflow.__file__
refused = {}
for module in pkgutil.walk_packages(torch_dpflow.__path__, "torch_dpflow.", onerror=lambda name: None):
    if module.name.endswith("__main__"):  # runs what it holds
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        refused[module.name] = str(error)
print(json.dumps(refused))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packed, with a wheel and a source distribution in dist/."""
    copy = tmp_path_factory.mktemp("source")
    (copy / "editable").mkdir()
    (copy / "tools").mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, copy / name)
    # As an earlier build has left it: no module of the wheel.
    (copy / "build/lib/torch_dpflow").mkdir(parents=True)
    (copy / "build/lib/torch_dpflow/gone.py").touch()
    shutil.copytree(ROOT / "torch_dpflow", copy / "torch_dpflow", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return copy


def modules(built: Path) -> set[str]:
    """Every module of the library, by its path."""
    return {path.relative_to(built).as_posix() for path in (built / "torch_dpflow").rglob("*.py")}


def test_the_wheel_holds_every_module_and_the_mark_of_its_types(built: Path) -> None:
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules(built) | files(built) | {"torch_dpflow/py.typed"}


def files(built: Path) -> set[str]:
    """Those of the live page, with the license of the library that draws its charts."""
    folder = built / "torch_dpflow/cluster/monitoring/page"
    found = {path.relative_to(built).as_posix() for path in folder.iterdir()}
    assert f"{folder.relative_to(built)}/uPlot.LICENSE" in found
    return found


def test_the_metadata_tells_what_a_user_needs(built: Path) -> None:
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Name"] == "torch_dpflow"
    assert metadata["Version"] == torch_dpflow.__version__
    assert metadata["Author"] == "The torch_dpflow project"
    assert metadata["License"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "torch>=2.6" in metadata.get_all("Requires-Dist")
    assert "DPFlowDataLoader" in str(metadata.get_payload())
    assert "dpflow = torch_dpflow.cli:main" in entry_points


def test_an_index_would_take_both(built: Path) -> None:
    packed = [str(path) for path in (built / "dist").iterdir()]
    assert len(packed) == 2
    told = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *packed],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("PASSED") == 2


def test_package_changelog_and_citation_state_one_version(built: Path) -> None:
    """And `make release-check` refuses others."""
    assert stated_versions(built) == torch_dpflow.__version__
    citation = yaml.safe_load((built / "CITATION.cff").read_text())
    assert citation["version"] == torch_dpflow.__version__  # a text, as 0.2.0 is one
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    for changed in ("CITATION.cff", "CHANGELOG.md"):
        text = (built / changed).read_text()
        (built / changed).write_text(text.replace(torch_dpflow.__version__, "9.9.9", 1))
        with pytest.raises(ValueError, match=r"9\.9\.9"):
            stated_versions(built)
        (built / changed).write_text(text)


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
    assert modules(built) | files(built) <= names


def test_the_wheel_holds_the_library_alone(built: Path) -> None:
    """Suites, servers that tests and benchmarks read from, simulators and examples stay in the repository."""
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist() if ".dist-info/" not in name]
        texts = {str(name): archive.read(str(name)).decode() for name in names if name.suffix == ".py"}
    assert {name.parts[0] for name in names} == {"torch_dpflow"}
    imported = re.compile(rf"""(?:import|from|import_module\(["']) ?(?:{"|".join(BESIDE)})\b""")
    assert [name for name, text in texts.items() if imported.search(text)] == []


def needed(requirements: Iterable[str]) -> set[str]:
    """The distributions that these bring along, themselves included; no extra of theirs."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, metadata.requires(name) or ())
    return found


def test_every_module_is_imported_with_what_an_installation_brings(built: Path, tmp_path: Path) -> None:
    """But for what needs an extra, and only for lack of that."""
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    brought = needed(requirements)
    absent = [
        module
        for module, distributions in distributions_of_modules().items()
        if module != "torch_dpflow" and not brought & set(map(canonicalize_name, distributions))
    ]
    assert {"click", "pyarrow"} <= set(absent)
    done = run_interpreter(IMPORT_ALL, json.dumps([*absent, *BESIDE]), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    refused = json.loads(done.stdout)
    assert [name for name in refused if not name.startswith(WITH_EXTRAS)] == []
    assert all(re.search("click|rich|pyarrow|vision|starlette|torchdata|uvicorn", why) for why in refused.values()), (
        refused
    )
