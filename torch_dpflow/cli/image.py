"""`dpflow image`: writes a Dockerfile for workers with the packages of the current environment."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import click

import torch_dpflow
from torch_dpflow._version import __version__
from torch_dpflow.errors import OptionError

#: Packages that workers do not need: installers, and packages for GPUs.
_LEFT_OUT = re.compile(r"pip|setuptools|wheel|triton|nvidia-.*|cuda-.*")
_ITSELF = "torch-dpflow"
#: Index with versions such as 2.6.0+cpu.
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_FILES = ("Dockerfile", "requirements.txt", "torch_dpflow")
_DOCKERFILE = """\
# Written by `dpflow image` of torch_dpflow {version}.
FROM python:{python}-slim
WORKDIR /opt/dpflow
COPY requirements.txt .
# Without dependencies, as all are listed with their versions.
RUN pip install --no-cache-dir --no-deps -r requirements.txt
{copy}ENV PYTHONPATH=/opt/dpflow PYTHONUNBUFFERED=1
# Missing packages fail here, not in the first worker.
RUN python -c "{check}"
CMD ["python", "-m", "torch_dpflow.remote.worker"]
"""
#: Program that checks the image when it is built: what a worker does before it receives anything.
CHECK = "from torch_dpflow.remote.worker import warm; warm()"


@dataclass
class Found:
    """Installed distributions of this environment, by what the image does with them."""

    #: Lines of requirements.txt, which the image installs.
    pinned: list[str] = field(default_factory=list)
    #: Names of distributions that were installed from files of this host: pip cannot install them in the image.
    local: list[str] = field(default_factory=list)
    #: Names of distributions that workers do not need.
    left_out: list[str] = field(default_factory=list)


@click.command()
@click.option("--out", default="docker", show_default=True, help="Output directory.")
@click.option("--without", multiple=True, help="Package that workers do not need; may be repeated.")
@click.option("--force", is_flag=True, help="Overwrite the files of an earlier call.")
def image(out: str, without: tuple[str, ...], force: bool) -> None:
    """Write a Dockerfile for an image of workers, with the packages of this environment at their versions.

    Your own modules need not be in the image, because they are sent to workers. Build and push the image with docker.
    """
    found = find({_normal(name) for name in without})
    itself = _ITSELF in found.local
    _write(Path(out), found, copies_itself=itself, force=force)
    click.echo(f"{out}: Dockerfile, and requirements.txt with {len(found.pinned)} packages")
    if found.left_out:
        click.echo(f"left out, as workers do not need them: {', '.join(found.left_out)}")
    others = [name for name in found.local if name != _ITSELF]
    if others:
        click.echo(
            f"not included, as installed from a directory: {', '.join(others)}; if samples need them, have the "
            "Dockerfile copy and install them"
        )
    click.echo(f"docker build -t REGISTRY/dpflow:{__version__} {out} && docker push REGISTRY/dpflow:{__version__}")


def find(without: set[str]) -> Found:
    """Return the installed distributions, sorted into the lists of `Found`.

    without: normalized names to leave out, in addition to installers and packages for GPUs. Raises OptionError if one
    of these names is not installed.
    """
    found, names = Found(), set()
    for distribution in metadata.distributions():
        name = _normal(distribution.metadata["Name"] or "")
        if not name or name in names:
            continue  # shadowed by the one found first
        names.add(name)
        if _LEFT_OUT.fullmatch(name) or name in without:
            found.left_out.append(name)
        elif (source := _source_of(distribution)) == "" or (name == _ITSELF and not _is_installed()):
            found.local.append(name)
        else:
            found.pinned.append(f"{name}{source}")
    if any(name.startswith(("nvidia-", "cuda-")) for name in found.left_out):
        # The default torch of the index is the one for those devices.
        found.pinned = [re.sub(r"^(torch(?:vision|audio)?==[\d.]+)$", r"\1+cpu", line) for line in found.pinned]
    if unknown := without - names:
        raise OptionError(f"--without {min(unknown)!r}: it is not installed here")
    for some in (found.pinned, found.local, found.left_out):
        some.sort()
    return found


def _is_installed() -> bool:
    """Return whether this package was installed from an index or a wheel, and is not a checkout.

    A checkout's metadata is next to the package and names no source. Python finds this metadata first in that
    directory.
    """
    return bool({"site-packages", "dist-packages"} & set(Path(torch_dpflow.__file__).parts))


def _source_of(distribution: metadata.Distribution) -> str:
    """Return the version or URL to append to a distribution's name; empty if it was installed from a directory."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        # The version for the CPU, such as 2.6.0+cpu for 2.6.0+cu124.
        return "==" + re.sub(r"\+(cu|rocm|xpu)[\w.]*$", "+cpu", distribution.version)
    source = json.loads(text)
    if "vcs_info" in source:
        return f" @ {source['vcs_info']['vcs']}+{source['url']}@{source['vcs_info']['commit_id']}"
    return "" if source["url"].startswith("file:") else f" @ {source['url']}"


def _write(out: Path, found: Found, *, copies_itself: bool, force: bool) -> None:
    there = [name for name in _FILES if (out / name).exists()]
    if there and not force:
        raise OptionError(f"{out} has {', '.join(there)} already; give another directory as --out, or --force")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "torch_dpflow", ignore_errors=True)
    if copies_itself:
        package = Path(torch_dpflow.__file__).parent
        shutil.copytree(package, out / "torch_dpflow", ignore=shutil.ignore_patterns("__pycache__"))
    (out / "requirements.txt").write_text("".join(f"{line}\n" for line in _lines(found)))
    (out / "Dockerfile").write_text(
        _DOCKERFILE.format(
            version=__version__,
            python=platform.python_version(),
            copy="COPY torch_dpflow torch_dpflow\n" if copies_itself else "",
            check=CHECK,
        )
    )


def _lines(found: Found) -> Iterator[str]:
    if any("+cpu" in line for line in found.pinned):
        yield f"--extra-index-url {_TORCH_INDEX}"
    yield from found.pinned


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
