"""What a process holds, to see what is left of it: threads, descriptors, processes, memory, files."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from tests.new_process import PRELOADED

#: What a new descriptor may point to without being a leak: opened once a process, by Python or a library.
HARMLESS_FILES = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")
#: Temporary files that outlive a test: of multiprocessing (fork server), of pytest, of torch's compiler.
HARMLESS_TEMPORARIES = ("pymp-", "pytest-of-", "torchinductor_")
#: What the files of memory that processes share have in their names.
SHARED = ("/memfd:", "/dev/shm/")
#: How much shared memory was resident when none was found that counts: what a library keeps stays as much.
_nothing_at = b""


def own_threads() -> frozenset[threading.Thread]:
    """Return the threads of this package: of the test that runs, and of one that failed before it."""
    return frozenset(one for one in threading.enumerate() if one.name.startswith("dpflow"))


@dataclass(frozen=True)
class Holdings:
    """What this process holds: each entry names one thing."""

    threads: frozenset[Any]
    descriptors: frozenset[tuple[int, str]]
    processes: frozenset[int]
    shared_memory: frozenset[str]
    temporaries: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            # Without threads of libraries such as pyarrow, which stay and have once called Python.
            threads=frozenset(one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)),
            descriptors=frozenset(_descriptors()),
            processes=frozenset(descendants()),
            shared_memory=frozenset(_shared_memory()),
            temporaries=frozenset(_temporaries()),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """What is held now and was not before."""
        found = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        found += [f"descriptor {number} -> {target}" for number, target in self.descriptors - before.descriptors]
        found += [f"process {pid}: {_command(pid)}" for pid in self.processes - before.processes]
        found += [f"shared memory {name}" for name in self.shared_memory - before.shared_memory]
        found += [f"temporary {name}" for name in self.temporaries - before.temporaries]
        return sorted(found)


def _descriptors() -> Iterator[tuple[int, str]]:
    multiprocessings = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    singletons = {*multiprocessings, PRELOADED.held()[1]}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
        if int(name) not in singletons and not target.startswith(HARMLESS_FILES):
            yield int(name), target


def descendants() -> Iterator[int]:
    """Children, their children and so on, but for processes that are started once: multiprocessing's and the tests'."""
    multiprocessings = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    singletons = {*multiprocessings, PRELOADED.held()[0]}
    pending = list(_children(os.getpid()))
    while pending:
        pid = pending.pop()
        pending += _children(pid)
        if pid not in singletons:
            yield pid


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _listing(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                found += map(int, children.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def _shared_memory() -> Iterator[str]:
    # The digits of a pid alone may be in other processes' names by chance.
    mine = re.compile(rf"(?<![0-9]){os.getpid()}(?![0-9])")
    yield from (name for name in _listing("/dev/shm") if mine.search(name))
    global _nothing_at
    resident = Path("/proc/self/status").read_bytes().partition(b"\nRssShmem:")[2].partition(b"\n")[0]
    if resident in (b"\t       0 kB", _nothing_at):
        return  # as in most tests, each of which looks twice: the kernel takes milliseconds to list all mappings
    # Not the semaphores of locks that a library makes once: tqdm, multiprocess.
    lines = Path("/proc/self/maps").read_text().splitlines()
    named = [line.split(maxsplit=5) for line in lines if any(name in line for name in SHARED)]
    found = [f"{area} {name}" for area, *_, name in named if not name.startswith("/dev/shm/sem.")]
    _nothing_at = b"" if found else resident
    yield from found


def _temporaries() -> Iterator[str]:
    # Of older releases of torch, as long as the process lives.
    torchs = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    kept = os.path.basename(getattr(torchs, "name", ""))
    for name in _listing(tempfile.gettempdir()):
        if not name.startswith(HARMLESS_TEMPORARIES) and name != kept:
            yield name


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
