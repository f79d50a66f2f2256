"""Forks instances of a function from a process that has imported what theirs would: `python -m ... MODULE`.

Each line on standard input is a port; an instance that listens there is answered by its pid. All end with this process.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from torch_dpflow.remote.worker import fc
from torch_dpflow.workers.process_control import at_parents_end, exit_with


def main(name: str) -> None:
    getattr(import_module(name), "warm", lambda: None)()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    print("ready", flush=True)
    # Not `for line in sys.stdin`: a fork would have what is buffered.
    while line := os.read(0, 4096):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            at_parents_end(signal.SIGKILL)
            exit_with(parent)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)
            port, *env = line.decode().split()
            os.environ.update(one.split("=", 1) for one in env)
            fc.main(name, int(port))
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
