"""Checks that this version can be released: `make release-check`.

What git tracks is copied, a source distribution is built of that and a wheel of the source distribution, each in an
environment of its own. `twine` checks both. The wheel is installed in an empty environment, at first alone, then with
what tests need, and a part of the tests runs from a directory outside the clone. All of it is in build/release; the
distributions are in its dist/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "release"
#: Of this package: how it meets users, what crosses between processes, what decides, and its command.
TESTS = (
    "tests/contracts",
    "tests/ipc/serialization/test_payload_properties.py",
    "tests/cluster/cache/test_sample_cache_properties.py",
    "tests/ipc/serialization",
    "tests/cli/test_cluster_printing.py",
    "tests/cluster/shared/test_shared_epochs.py",
)
TOOLS = ("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "pillow", "tqdm")
#: Without anything but its requirements, from an empty directory.
FIRST_USE = """
import sys, torch, torch_dpflow
assert torch_dpflow.__file__.startswith(sys.prefix), torch_dpflow.__file__
from torch_dpflow import DPFlowDataLoader
data = torch.utils.data.TensorDataset(torch.arange(100))
if __name__ == "__main__":
    loader = DPFlowDataLoader(data, batch_size=10, shuffle=True, num_workers=2)
    assert sorted(int(i) for (batch,) in loader for i in batch) == list(range(100))
    print(torch_dpflow.__version__, "from", torch_dpflow.__file__)
    print(loader.stats())
"""


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    version = stated_versions(ROOT)
    source, dist, outside = FOLDER / "source", FOLDER / "dist", FOLDER / "outside"
    copy_tracked(source)
    outside.mkdir()
    print(f"-- build {version}")
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_sdist('../dist')", cwd=source)
    (packed,) = dist.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", dist, packed)
    (wheel,) = dist.glob("*.whl")
    assert f"-{version}-" in wheel.name, wheel
    run(sys.executable, "-m", "twine", "check", "--strict", packed, wheel)

    print("-- install the wheel in an empty environment")
    venv.create(FOLDER / "venv", with_pip=True)
    python = FOLDER / "venv" / "bin" / "python"
    # torch first, at the version that development has: an open requirement may bring CUDA packages along.
    pip = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*pip, "torch")
    run(*pip, wheel)
    run(python, "-m", "pip", "check")
    (outside / "first_use.py").write_text(FIRST_USE, "utf-8")
    run(python, "-W", "error", "first_use.py", cwd=outside)

    print("-- run tests of it from outside the clone")
    run(*pip, f"{wheel}[cli,metrics]", *TOOLS)
    run(python, "-m", "torch_dpflow.cli", "--help", cwd=outside, stdout=subprocess.DEVNULL)
    shutil.copytree(source / "tests", outside / "tests")
    shutil.copy(source / "setup.cfg", outside)
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-n", "2", "--dist")
    run(*tests, "loadfile", *TESTS, cwd=outside)
    print(f"-- {packed.name} and {wheel.name} in {dist} can be released")
    return 0


def stated_versions(root: Path) -> str:
    """The version, which package, changelog and citation state alike.

    Raises ValueError if they do not.
    """
    stated = {
        name: _first(pattern, root / name)
        for name, pattern in (
            ("torch_dpflow/_version.py", r'^__version__ = "(.+)"$'),
            ("CHANGELOG.md", r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$"),
            ("CITATION.cff", r"^version: (.+)$"),
        )
    }
    if len(set(stated.values())) != 1:
        raise ValueError(f"versions differ: {stated}; state the same in all of them")
    return stated["CITATION.cff"]


def _first(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else "none"


def copy_tracked(to: Path) -> None:
    """Copy the files that git tracks, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name, follow_symlinks=False)


def run(*command: object, **options: object) -> None:
    """Run a command; its failure is the end of the check."""
    # Neither the clone nor what is installed for it.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], env=env, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"release-check: this failed: {' '.join(str(part) for part in command)}")


if __name__ == "__main__":
    sys.exit(main())
