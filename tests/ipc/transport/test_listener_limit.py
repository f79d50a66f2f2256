"""A listener whose process has no descriptors left: libzmq would abort it over the next connection."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tests.new_process import in_fork
from torch_dpflow.ipc.transport import connect, listen


def full(path: str) -> tuple[int, bool, int]:
    listener = listen(f"ipc://{path}")
    child = os.fork()
    if not child:
        connections = []
        for _ in range(120):  # one after the other: the process cannot look faster than its kernel connects
            connections.append(connect(listener.address))
            connections[-1].send([b"hello"])
            while connections[-1].receive(None) is None:
                pass
        os._exit(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What the test process has open comes on top.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 65, hard))
    taken = 0
    while (message := listener.receive(150.0 if not taken else 0.3)) is not None or os.path.exists(path):
        if message is not None:
            taken += listener.send(*message)
    hidden = not os.path.exists(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rest = 0
    while taken + rest < 120:
        message = listener.receive(150.0)
        if message is not None:
            rest += listener.send(*message)
    os.waitpid(child, 0)
    listener.close()
    return taken, hidden, taken + rest


def test_it_takes_no_more_connections_until_there_are_some(tmp_path: Path) -> None:
    taken, hidden, all_of_them = in_fork(full, str(tmp_path / "socket"))
    assert 30 <= taken < 80
    assert hidden
    assert all_of_them == 120
