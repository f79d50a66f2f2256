"""Resources of a node on its host: signals, descriptors, a directory, and a fork server for its processes."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_dpflow._core.descriptors import exhausted, soft_limit
from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow.cluster.control.supervision import LEASE_S, START_S
from torch_dpflow.cluster.services.service import PRELOAD
from torch_dpflow.errors import OptionError
from torch_dpflow.workers.fork_server import ForkServerPlatform
from torch_dpflow.workers.local_platform import DESCRIPTORS

#: Number of descriptors that a node keeps for itself; and limit of descriptors that it requests, enough for any
#: cluster.
OWN_DESCRIPTORS, WISHED_DESCRIPTORS = 64, 65536


def max_processes() -> int:
    """Return how many child processes this process can have at a time, by its limit of open files."""
    return max(0, soft_limit() - OWN_DESCRIPTORS) // (DESCRIPTORS + 1)  # and its connection


def max_workers() -> int:
    """Return how many workers all flows can have together, by this process's limit of open files.

    Each worker counts as three processes: for each worker, at most one router and one shard run too.

    Raises DescriptorLimitError if the limit allows no worker.
    """
    most = (max_processes() - 1) // 3  # one process is the coordinator
    if most < 1:
        raise exhausted(f"a cluster needs a limit of {OWN_DESCRIPTORS + 4 * (DESCRIPTORS + 1)} for its first worker")
    return most


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT during the body. Use this in the main thread."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, lambda *_: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous):
            signal.signal(number, handler)


def fork_platform() -> ForkServerPlatform:
    """Return the platform on which a node starts its processes: a fork server of this host."""
    # Processes are forked from a server that has imported torch: 2 s and 130 MB less for each worker. A client never
    # chooses what it imports.
    return ForkServerPlatform(preload=["torch", *PRELOAD], timeouts_s=(LEASE_S, START_S), outlived=True)


def keep_fork_server_in(directory: str) -> None:
    """Make multiprocessing put the socket of its fork server into `directory`."""
    process: Any = multiprocessing.current_process()
    process._config.setdefault("tempdir", directory)


def private_directory() -> PrivateDirectory:
    """Create and return a directory for the sockets of a node. Raises OptionError if that fails."""
    try:
        return PrivateDirectory()
    except OSError as error:
        raise OptionError(
            f"no directory for sockets can be made in {tempfile.gettempdir()!r}: {error.strerror}; set TMPDIR"
        ) from error
