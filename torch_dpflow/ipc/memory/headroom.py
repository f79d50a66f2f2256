"""How much memory can be allocated before the kernel kills processes.

Shared memory is reserved page by page. Where the machine's or the container's memory is exhausted meanwhile, Linux
returns no error but kills a process, so the available memory is checked first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch_dpflow.errors import OptionError


def of_machine(name: str) -> int:
    """Bytes of the machine's memory, as in /proc/meminfo: "MemTotal", "MemAvailable" and so on."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class _Files(NamedTuple):
    """The names of files and entries in a version of control groups."""

    limit: str
    usage: str
    #: Entries of memory.stat: the part of the usage that the kernel can reclaim.
    droppable: tuple[str, ...]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


class Headroom:
    """The memory that is available to this process, on the machine and in the control groups that limit it.

    Args:
        memberships: the file that lists the process's groups.
        mount: where the groups' files are.
    """

    def __init__(
        self, *, memberships: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._machine = of_machine("MemTotal")
        self._groups = [
            (folder, files)
            for folder, files in _groups(memberships, mount)
            if _number(folder / files.limit, self._machine) < self._machine
        ]

    def total(self) -> int:
        """Bytes that this process could ever have: of the machine, or what its control groups allow."""
        limits = (_number(folder / files.limit, self._machine) for folder, files in self._groups)
        return min([self._machine, *limits])

    def available(self) -> int:
        """Available bytes. Raises OSError where the process has no descriptor left to read them."""
        machine = of_machine("MemAvailable")
        return min([machine, *(_left_in(folder, files) for folder, files in self._groups)])


def check_memory(name: str, size: int) -> None:
    """Raise OptionError if this process can never have so many bytes."""
    total = Headroom().total()
    if size > total:
        raise OptionError(f"{name}={size:,} bytes: {total:,} are all that this process can have; give fewer")


def _groups(memberships: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    """The memory control groups that the process is in, from the innermost outwards."""
    try:
        lines = memberships.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
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
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):  # no such group here, or "max"
        return otherwise


def _left_in(folder: Path, files: _Files) -> int:
    most = int((folder / files.limit).read_text())
    used = int((folder / files.usage).read_text())
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return most - used + sum(int(statistics.get(name, 0)) for name in files.droppable)
