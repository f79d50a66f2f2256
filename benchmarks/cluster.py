"""What the processes of a cluster use and hold, for benchmarks."""

import os
import time
from collections import defaultdict
from dataclasses import dataclass

import psutil

from examples.cluster import processes

#: By when a flow's workers are there, seconds.
PATIENCE_S = 180.0


def wait_for_workers(address: str, count: int) -> None:
    """Wait until a flow's shards have so many workers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        shards = [view.status for view in processes(address) if view.role == "shard"]
        found = sum(status.get("workers", 0) for status in shards)
        if found >= count:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} of {count} workers were there after {PATIENCE_S:g} s")
        time.sleep(0.1)


@dataclass(kw_only=True)
class RoleUse:
    """What the processes of one role have used and hold, together."""

    processes: int = 0
    #: Processor time since they began, seconds.
    cpu_s: float = 0.0
    #: Memory, bytes: shared pages divided among those who map them; pages of their own alone.
    pss: int = 0
    uss: int = 0


def use_by_role(address: str, *, memory: bool = False) -> dict[str, RoleUse]:
    """By role; "node" is the node and what it forks from. Memory takes milliseconds for each process."""
    roles = {view.pid: view.role for view in processes(address) if view.pid}
    family = {pid for known in roles for pid in [known, *_ancestors_of(known)]}
    use: dict[str, RoleUse] = defaultdict(RoleUse)
    for pid in family:
        role = use[roles.get(pid, "node")]
        role.processes += 1
        role.cpu_s += cpu_s(pid)
        if memory:
            info = psutil.Process(pid).memory_full_info()
            role.pss += info.pss
            role.uss += info.uss
    return use


def cpu_s(pid: int) -> float:
    """Processor time of a process and all threads that it has had, seconds."""
    # What clock_getcpuclockid(3) gives. The kernel's other count of it goes in steps of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


def _ancestors_of(pid: int) -> list[int]:
    """The node and the server that forks for it, in any order."""
    parents: list[int] = []
    for parent in psutil.Process(pid).parents():
        if parent.pid == os.getpid():
            return parents
        parents.append(parent.pid)
    return []
