"""The roles of a node's processes, and the function that each runs."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections.abc import Callable
from importlib import import_module

from torch_dpflow.cluster.services.spec import ServiceSpec, subjects_of
from torch_dpflow.log import write_lines

#: The ids of the processes that a node runs by itself: the second only where a platform runs the workers, the third
#: where the live page is wanted, the fourth where datasets are held in memory.
COORDINATOR, KEEPER, PAGE, POOL = "coordinator", "keeper", "page", "pool"
#: The function of each role.
ROLES = {
    "coordinator": "torch_dpflow.cluster.services.coordinator_process:run",
    "keeper": "torch_dpflow.cluster.services.keeper:run",
    "page": "torch_dpflow.cluster.services.page:run",
    "pool": "torch_dpflow.pool.server.data_server:run_service",
    "router": "torch_dpflow.cluster.services.router:run",
    "shard": "torch_dpflow.cluster.shard.run:run",
    "worker": "torch_dpflow.cluster.shard.sample_worker:run",
}
#: Imported once, for all processes of a node; a server of the pool, which few clusters have, imports what it needs.
PRELOAD = [target.partition(":")[0] for role, target in ROLES.items() if role != POOL]


def main(service: ServiceSpec) -> None:
    """Run the role that the specification names, until the process ends."""
    # Control-C reaches every process of the terminal. The node stops on it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_lines(service.place.log, {**subjects_of(service.id), "process": service.id, "pid": os.getpid()})
    # For a process that seems to hang: kill -USR1 writes the stacks of its threads to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, name = ROLES[service.role].partition(":")
    run: Callable[[ServiceSpec], None] = getattr(import_module(module), name)
    # Modules are never collected: skipping them saves time, and keeps the pages shared with the fork server.
    gc.freeze()
    run(service)
