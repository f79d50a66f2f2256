"""What a host's first process needs to start others: a directory, a fork server, modules that are imported once."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow.cluster.control.supervision import START_S
from torch_dpflow.cluster.services.node import LEASE_S
from torch_dpflow.cluster.services.roles import PRELOAD
from torch_dpflow.errors import OptionError
from torch_dpflow.workers.local_platform import ForkServerPlatform


def fork_platform(preload: Sequence[str]) -> ForkServerPlatform:
    """The platform of a node. preload: modules to import once, beside this package's own."""
    # Processes are forked from a server that has imported torch: 2 s and 130 MB less for each worker. The node
    # waits for each fork and serves nothing meanwhile, so a fork server that hangs is killed after `patience_s`.
    # Only the operator chooses what it imports (`preload`), never a client.
    return ForkServerPlatform(preload=[*PRELOAD, *preload], timeouts_s=(LEASE_S, START_S), outlived=True)


def keep_fork_server_in(directory: str) -> None:
    """Have multiprocessing put the socket of its fork server into this directory.

    Its own directory would stay for good if this process is killed; the cluster's is removed by the last survivor.
    """
    process: Any = multiprocessing.current_process()
    process._config.setdefault("tempdir", directory)


def check_installed(module: str) -> None:
    """Raise OptionError unless a module of this name is installed. Imports nothing."""
    if module in sys.modules:
        return
    top, *rest = names = module.split(".")
    found = find_spec(top) if all(name.isidentifier() for name in names) else None
    for name in rest:  # not all at once by `find_spec`, which imports the packages on the way
        places = None if found is None else found.submodule_search_locations
        found = (
            None if found is None or places is None else PathFinder.find_spec(f"{found.name}.{name}", places)
        )
    if found is None:
        raise OptionError(f"--preload {module!r}: no such module is installed; install it, or leave it out")


def private_directory() -> PrivateDirectory:
    """A directory for sockets. Raises OptionError if none can be made."""
    try:
        return PrivateDirectory()
    except OSError as error:
        raise OptionError(
            f"no directory for sockets can be made in {tempfile.gettempdir()!r}: {error.strerror}; set TMPDIR"
        ) from error
