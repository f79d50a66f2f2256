"""Measurement of the memory that can be allocated before the kernel kills processes.

Shared memory is reserved page by page. If the memory of the machine or container is exhausted meanwhile, Linux returns
no error but kills a process, so the available memory is checked first. Figures that the system does not provide are
estimated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch_dpflow._core.descriptors import is_exhausted
from torch_dpflow.errors import OptionError

_MEMINFO = Path("/proc/meminfo")
#: Assumed bytes of a machine whose memory is unknown.
_UNKNOWN_BYTES = 4 << 30


def machine_total() -> int:
    """Return the bytes of the machine's memory; 4 GiB if unknown."""
    return _known_total() or _UNKNOWN_BYTES


def _known_total() -> int:
    """Return the bytes of the machine's memory; 0 if unknown."""
    return _meminfo().get("MemTotal", 0) or _pages("SC_PHYS_PAGES")


def _machine_available() -> int:
    """Return the bytes that can be allocated; half of all memory if unknown.

    Sandboxes and containers (gVisor, lxcfs, OpenVZ) may have a file without MemAvailable, an empty one, or none.
    """
    found = _meminfo()
    free = sum(found.get(name, 0) for name in ("MemFree", "Buffers", "Cached"))
    return found.get("MemAvailable", 0) or free or _pages("SC_AVPHYS_PAGES") or machine_total() // 2


def _meminfo() -> dict[str, int]:
    """Return the entries of /proc/meminfo, bytes by name, without unreadable entries."""
    found: dict[str, int] = {}
    for line in _text(_MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        number = rest.removesuffix("kB").strip()
        if number.isdecimal():
            found[name] = int(number) * 1024
    return found


def _pages(name: str) -> int:
    try:
        return max(0, os.sysconf(name) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError):  # no such name here
        return 0


def _text(file: Path) -> str:
    """Return a file's text; empty if it cannot be read. Raises OSError if this process has no descriptor left."""
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        if is_exhausted(error):
            raise
        return ""


class _Files(NamedTuple):
    """Names of files and entries in one version of control groups."""

    limit: str
    usage: str
    #: Entries of memory.stat: the part of the usage that the kernel can reclaim.
    droppable: tuple[str, ...]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


class Headroom:
    """Memory that is available to this process, on the machine and in the control groups that limit the process.

    Args:
        memberships: file that lists the control groups of the process.
        mount: directory that contains the files of all control groups.
    """

    def __init__(self, *, memberships: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> None:
        self._machine = machine_total()
        self._groups = [
            (folder, files)
            for folder, files in _groups(memberships, mount)
            if _number(folder / files.limit, self._machine) < self._machine
        ]

    @property
    def is_limited(self) -> bool:
        """Whether a control group allows less memory than the machine has."""
        return bool(self._groups)

    def total(self) -> int:
        """Return the memory limit of this process, bytes: the machine's memory, or a lower limit of a control group."""
        limits = (_number(folder / files.limit, self._machine) for folder, files in self._groups)
        return min([self._machine, *limits])

    def available(self) -> int:
        """Return the bytes that this process can still allocate. Raises OSError if no descriptor is left."""
        left = (_left_in(folder, files) for folder, files in self._groups)
        return min([_machine_available(), *(one for one in left if one is not None)])


def check_memory(name: str, size: int) -> None:
    """Raise OptionError if `size` bytes exceed the memory limit of this process; do nothing if no limit is known.

    name: name of the option, for the error.
    """
    headroom = Headroom()
    total = headroom.total()
    if size > total and (_known_total() or headroom.is_limited):
        raise OptionError(f"{name}={size:,} bytes is more than this process can have ({total:,}); give fewer")


def _groups(memberships: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the memory control groups of the process, from the innermost outwards."""
    for line in _text(memberships).splitlines():  # none: not Linux
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path:
            continue
        if not controllers:
            yield from ((folder, _V2) for folder in _from(mount, path))
        elif "memory" in controllers.split(","):
            yield from ((folder, _V1) for folder in _from(mount / "memory", path))


def _from(mount: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's, and only the container's own group is there, at the mount.
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _number(file: Path, otherwise: int) -> int:
    number = _text(file).strip()
    return int(number) if number.isdecimal() else otherwise  # no such group here, or "max"


def _left_in(folder: Path, files: _Files) -> int | None:
    """Return the bytes that the processes of a control group may still allocate; None if unknown."""
    limit, used = (_number(folder / name, -1) for name in (files.limit, files.usage))
    if limit < 0 or used < 0:
        return None
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    statistics = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    return limit - used + sum(int(statistics.get(name, 0)) for name in files.droppable)
