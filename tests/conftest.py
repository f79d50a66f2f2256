"""What every test runs under: no leaks, a temporary directory of its own, a choice of loader class."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: How long a test's threads, processes and files may take to go after its end; seconds.
GRACE_S = 10.0
#: What a new descriptor may point to without being a leak: opened once a process, by Python or a library.
HARMLESS_FILES = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")
#: Temporary files that live as long as the process: those of multiprocessing (fork server) and of pytest.
HARMLESS_TEMPORARIES = ("pymp-", "pytest-of-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loader",
        choices=("dpflow", "torch"),
        default="dpflow",
        help="the class that the contract tests of the loader are run against",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A spawned worker imports the datasets of these tests by name, from the root.
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    # Other test processes work in /tmp too; in a directory of our own, whatever is left over is ours.
    shared = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    own = tempfile.mkdtemp(prefix="t-", dir=shared)
    os.environ["TMPDIR"] = tempfile.tempdir = own
    # After multiprocessing has removed its directory inside, at priority -100.
    util.Finalize(None, shutil.rmtree, args=(own,), kwargs={"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


_PASSED = pytest.StashKey[bool]()


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
            threads=frozenset(threading.enumerate()),
            descriptors=frozenset(_descriptors()),
            processes=frozenset(_descendants()),
            shared_memory=frozenset(_shared_memory()),
            temporaries=frozenset(_temporaries()),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """What is held now and was not before."""
        found = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        found += [
            f"descriptor {number} -> {target}" for number, target in self.descriptors - before.descriptors
        ]
        found += [f"process {pid}: {_command(pid)}" for pid in self.processes - before.processes]
        found += [f"shared memory {name}" for name in self.shared_memory - before.shared_memory]
        found += [f"temporary {name}" for name in self.temporaries - before.temporaries]
        return sorted(found)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that passes leaves no thread, descriptor, process, shared memory or temporary file behind."""
    before = Holdings.now()
    yield
    if not request.node.stash.get(_PASSED, False):
        return  # the traceback of a failed test keeps its loaders alive
    leaked = Holdings.now().beyond(before)
    deadline = time.monotonic() + GRACE_S
    while leaked and time.monotonic() < deadline:
        gc.collect()
        multiprocessing.active_children()  # reaps those that have ended
        threading.Event().wait(0.02)
        leaked = Holdings.now().beyond(before)
    assert not leaked, "left behind by the test:\n  " + "\n  ".join(leaked)


def _descriptors() -> Iterator[tuple[int, str]]:
    singletons = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
        if int(name) not in singletons and not target.startswith(HARMLESS_FILES):
            yield int(name), target


def _descendants() -> Iterator[int]:
    singletons = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
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
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def _shared_memory() -> Iterator[str]:
    mine = str(os.getpid())
    yield from (name for name in _listing("/dev/shm") if mine in name)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:
            yield line.split(maxsplit=1)[0] + " " + line.split(maxsplit=5)[-1]


def _temporaries() -> Iterator[str]:
    for name in _listing(tempfile.gettempdir()):
        if not name.startswith(HARMLESS_TEMPORARIES):
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


@pytest.fixture(scope="session")
def Loader(request: pytest.FixtureRequest) -> type[Any]:
    """The class under test: ours, or torch's with `--loader torch`."""
    if request.config.getoption("--loader") == "torch":
        from torch.utils.data import DataLoader

        return DataLoader
    from torch_dpflow import DPFlowDataLoader

    return DPFlowDataLoader


@pytest.fixture(scope="session")
def OurLoader(request: pytest.FixtureRequest) -> type[Any]:
    """Our class, where a test is about what torch's loader does not do."""
    if request.config.getoption("--loader") == "torch":
        pytest.skip("torch's loader does not promise this")
    from torch_dpflow import DPFlowDataLoader

    return DPFlowDataLoader


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds; fail when it does not within the deadline."""

    def wait(condition: Callable[[], Any], *, within_s: float = 30.0, what: str = "the condition") -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {within_s} s"
            threading.Event().wait(0.01)

    return wait
