"""What a process of a node can be."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections.abc import Callable
from importlib import import_module

from torch_dpflow.log import write_lines
from torch_dpflow.remote.process.spec import ServicePost, subjects_of

#: The id of the one process that a node keeps of its own accord.
COORDINATOR = "coordinator"
#: The function that is the role, by name.
ROLES = {
    "coordinator": "torch_dpflow.remote.services.coordinator:run",
    "router": "torch_dpflow.remote.services.router:run",
    "shard": "torch_dpflow.remote.shard.run:run",
    "worker": "torch_dpflow.remote.worker.sample_worker:run",
}
#: Imported once, for all processes of a node.
PRELOAD = [target.partition(":")[0] for target in ROLES.values()]


def main(post: ServicePost) -> None:
    """Be what the post says until the process ends."""
    write_lines(post.place.log, {**subjects_of(post.id), "process": post.id, "pid": os.getpid()})
    # What a process is at, when it seems to hang: kill -USR1 writes the stacks of its threads to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, name = ROLES[post.role].partition(":")
    run: Callable[[ServicePost], None] = getattr(import_module(module), name)
    # All modules stay to the end: collections pass them by, and pages that processes share stay shared.
    gc.freeze()
    run(post)
