"""Check, before anything is unpickled, that a worker has the versions and modules to load its content."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache

from torch_dpflow._version import __version__
from torch_dpflow.remote.shipping.modules import find_spec, is_importable, is_own_path, modules_in

#: Distributions that are compared, by their names in `versions_here`.
_COMPARED = {
    "torch": "torch",
    "numpy": "numpy",
    "cloudpickle": "cloudpickle",
    "torchvision": "torchvision",
    "pillow": "Pillow",
}
#: Other versions of these may change the last bits of samples.
_OF_SAMPLES = ("torch", "torchvision", "numpy", "pillow")
_MIN_TORCH = (2, 6)
_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")


def versions_here() -> dict[str, str]:
    """Return the versions of Python, this package and installed libraries that affect pickles or samples, by name."""
    found = {"python": platform.python_version(), "torch_dpflow": __version__}
    for name, distribution in _COMPARED.items():
        version = version_of(distribution)
        if version is not None:
            found[name] = version
    return found


def unfit(worker: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return why a worker cannot load pickles of this process, and what to do; empty if it can.

    worker, here: the `versions_here` of the worker and of this process.
    """
    for name, parts, reason in (
        ("torch_dpflow", 2, "they would not understand each other"),
        ("python", 2, "functions travel as bytecode"),
        ("numpy", 1, "arrays are pickled by the names of its modules"),
        ("cloudpickle", 1, "functions are pickled by the names of its own"),
    ):
        there, own = worker.get(name, ""), here.get(name, "")
        if own and _release(there)[:parts] != _release(own)[:parts]:
            text = f"it has {_called(name, there)} and this process {_called(name, own)}; {reason}"
            return f"{text}. {_remedy(name, own)}"
    there = worker.get("torch", "")
    if _release(there) < _MIN_TORCH:
        least = ".".join(map(str, _MIN_TORCH))
        return f"it has {_called('torch', there)}, and {least} is the least. {_remedy('torch', here.get('torch', ''))}"
    return ""


def warnings_of(worker: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return texts about version differences that may change samples, for a worker that `unfit` accepts."""
    found = []
    for name in _OF_SAMPLES:
        there, own = worker.get(name), here.get(name)
        if there is not None and own is not None and _release(there) != _release(own):
            found.append(
                f"workers have {_called(name, there)} and this process {_called(name, own)}: samples may differ in "
                "their last bits"
            )
    return found


def required_modules(pickled: bytes) -> frozenset[str]:
    """Return the modules that a pickle names, except the script and standard ones. Raises MessageError if invalid."""
    names = modules_in(pickled)
    return frozenset(name for name in names if name.partition(".")[0] not in sys.stdlib_module_names)


def missing_modules(names: Iterable[str]) -> list[str]:
    """Return which of these modules, or of those that their packages import, are missing here. May import packages."""
    found: set[str] = set()
    for name in names:
        if find_spec(name) is None:
            found.update(_missing(name))
    return sorted(found)


@cache
def distributions_of_modules() -> Mapping[str, list[str]]:
    """Return, by top-level module, the names of the installed distributions that contain it."""
    # The mapping of `importlib.metadata` leaves out some distributions, such as numpy before Python 3.11.
    found: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"])
        tops = {*(distribution.read_text("top_level.txt") or "").split()}
        if not tops:
            # Twenty times faster than `distribution.files`, which makes a path and a hash of each line.
            record = distribution.read_text("RECORD")
            files = record.splitlines() if record is not None else map(str, distribution.files or ())
            paths = [line.partition(",")[0].split("/") for line in files]
            tops = {one[0] if one[1:] else one[0].partition(".")[0] for one in paths if is_importable(one[-1])}
        for top in filter(str.isidentifier, tops):
            found.setdefault(top, set()).add(name)
    return {top: sorted(names) for top, names in found.items()}


def missing_text(names: Iterable[str]) -> str:
    """Return the error text for modules that workers lack, with advice based on what is installed here."""
    distributions = distributions_of_modules()
    tops = dict.fromkeys(name.partition(".")[0] for name in sorted(set(names)))
    pinned, own, unknown = [], [], []
    for top in tops:
        spec = find_spec(top)
        if top in distributions:
            distribution = distributions[top][0]
            pinned.append(f"'{distribution}=={(version_of(distribution) or '').partition('+')[0]}'")
        elif spec is not None and spec.origin is not None and is_own_path(spec.origin):
            own.append(repr(os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin))
        else:
            unknown.append(top)
    advice = [
        f"install there what this process has: pip install {' '.join(pinned)}" if pinned else "",
        f"send what is yours with LoaderOptions(code=[{', '.join(own)}])" if own else "",
        f"install there what has {', '.join(unknown)}, or send it with LoaderOptions(code=[...])" if unknown else "",
    ]
    return f"modules are missing where workers run: {', '.join(tops)}; {'; '.join(filter(None, advice))}"


def _missing(name: str) -> list[str]:
    """Return [name] if a module is missing, the import that its package lacks, or [] if nothing is missing."""
    if find_spec(name.partition(".")[0]) is None:
        return [name]
    try:
        return [] if importlib.util.find_spec(name) is not None or name in sys.modules else [name]
    except ModuleNotFoundError as error:
        return [error.name or name]
    except Exception:  # the user's own code, which unpickling runs as well: its error appears there
        return []


@cache  # a process that forks workers has looked before
def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without suffixes such as "+cpu"; empty for anything else."""
    found = _RELEASE.match(version)
    return () if found is None else tuple(int(part) for part in found.groups() if part is not None)


def _called(name: str, version: str) -> str:
    shown = "Python" if name == "python" else name
    if not version:
        return f"no {shown}"
    return f"{shown} {version[:40] if version.isprintable() else ascii(version[:40])}"


def _remedy(name: str, version: str) -> str:
    if name == "python":
        return f"Run workers with Python {'.'.join(version.split('.')[:2])}, or this process with theirs"
    release = version.partition("+")[0]  # builds such as "+cpu" are on separate indexes
    return f"Where workers run: pip install '{name}=={release}' (or build their image again with it)"
