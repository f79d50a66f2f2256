"""What runs on a node of Ray: an actor, and in a child process of it the member.

A process of its own, because the member's torch wants the main thread and its signals, which Ray has in the actor's,
and because user code may call os._exit or crash: the actor survives that, and tells the exit code and the last words.
`python -m torch_dpflow.remote.launchers.ray_member MODULE PID` is that child; it imports `MODULE` and calls its
`run(launch_spec)`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import import_module
from typing import IO, Any

from torch_dpflow.remote.launchers.subprocesses import take_launch_spec
from torch_dpflow.workers.orphan import exit_with
from torch_dpflow.workers.platform import MAX_REPORT_CHARS

#: How long an actor waits for its launch spec, and for the last output of a child that has ended, seconds.
LAUNCH_SPEC_S, OUTPUT_S = 60.0, 2.0


class WorkerActor:
    """Runs one member. Not decorated, so that this module needs no Ray."""

    def __init__(self) -> None:
        # Whoever has started it may be killed before it sends the launch spec.
        self._idle = threading.Timer(LAUNCH_SPEC_S, os._exit, (1,))
        self._idle.daemon = True
        self._idle.start()

    def ready(self) -> None:
        """Answered once the actor has its place."""

    def run(self, module: str, launch_spec: bytes) -> tuple[int, int, str]:
        """Run a member to its end; its pid, its exit code or minus its signal, and the end of its standard error."""
        self._idle.cancel()
        try:
            return _run(module, launch_spec)
        finally:
            _current_actor().__ray_terminate__.remote()  # after this method's answer


def _run(module: str, launch_spec: bytes) -> tuple[int, int, str]:
    # Ray has put `runtime_env` and the driver's directories into this process's path.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__, module, str(os.getpid())]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        words = bytearray()
        reader = threading.Thread(target=_forward, args=(child.stderr, words), daemon=True)
        reader.start()
        child.stdin.write(
            launch_spec
        )  # not by its environment or arguments, which others may read: it has a key
        child.stdin.close()
        code = child.wait()
        reader.join(OUTPUT_S)  # which what the member has started may hold open
        return child.pid, code, bytes(words).decode(errors="replace").strip()


def _forward(source: IO[bytes], words: bytearray) -> None:
    """Write all of `source` to this process's standard error, which Ray shows, and keep its end."""
    while chunk := os.read(source.fileno(), 65536):
        words += chunk
        del words[:-MAX_REPORT_CHARS]
        sys.stderr.write(chunk.decode(errors="replace"))
        sys.stderr.flush()


def _current_actor() -> Any:
    return sys.modules["ray"].get_runtime_context().current_actor


def main(module: str, parent: int) -> Any:
    """Run the member whose launch spec is on standard input; what its `run` returns."""
    exit_with(parent, by_kernel=True)
    return import_module(module).run(take_launch_spec())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
