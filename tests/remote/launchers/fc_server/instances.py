"""Instances of a function: real processes that run the real entry, called by the runtime's contract of HTTP."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from tests.new_process import Interpreter

#: How long an instance may take to listen, seconds.
READY_S = 120.0
ENTRY = "torch_dpflow.remote.worker.fc"


class Instance:
    """One instance, which is there when it listens."""

    def __init__(self, pid: int, port: int, host: str, process: subprocess.Popen[bytes] | None) -> None:
        self.id = f"c-{secrets.token_hex(4)}"
        self.pid, self.port, self.host = pid, port, host
        self._process = process
        #: Whether another process waits for it: what starts it elsewhere.
        self.is_elsewhere = False
        #: Whether it has run nothing.
        self.is_fresh = False

    def await_ready(self) -> None:
        """Wait until it listens, and have it initialize."""
        deadline = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection((self.host, self.port), 1.0).close()
                break
            except OSError:
                if time.monotonic() > deadline or not psutil.pid_exists(self.pid):
                    raise
                time.sleep(0.01)
        self.call("POST", "/initialize", {}, b"", READY_S)

    def call(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Make a request. Raises OSError or HTTPException where it ends without an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def processes(self) -> list[psutil.Process]:
        """It, and what it has started."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        return []

    def workers(self) -> list[int]:
        """The pids of workers in it."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            return [child.pid for child in (first.children()[0] if self.is_elsewhere else first).children()]
        return []

    def signal(self, number: int) -> None:
        """Send it all a signal."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """End it all, and wait for that."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait()
        psutil.wait_procs(processes, timeout=10)


class Templates:
    """Processes that fork instances, by the module that workers run: importing torch takes seconds, here too."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._lock = threading.Lock()
        self._started: dict[str, Interpreter] = {}

    def fork(self, module: str, port: int, env: Mapping[str, str]) -> int:
        """Have an instance forked; its pid."""
        with self._lock:
            template = self._started.get(module)
            if template is None:
                command = [sys.executable, "-m", "tests.remote.launchers.fc_server.template", module]
                template = self._started[module] = Interpreter(
                    command, stdin=subprocess.PIPE, stderr=None, env={**os.environ, **self._env}
                )
                assert template.stdout is not None
                assert template.stdout.readline() == "ready\n"
            assert template.stdin is not None
            assert template.stdout is not None
            line = " ".join([str(port), *(f"{name}={value}" for name, value in env.items())])
            template.stdin.write(line)
            template.stdin.flush()
            return int(template.stdout.readline())

    def close(self) -> None:
        """End them, and all instances with them."""
        for template in self._started.values():
            with template:
                template.kill()


def spawn(command: Sequence[str], prefix: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an instance as its image's command says. prefix: runs a command elsewhere."""
    words = [sys.executable if word == "python" else word for word in command]
    return subprocess.Popen(
        [*prefix, *words],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def freeze(instance: Instance) -> None:
    """As the platform does with an instance that has answered."""
    instance.signal(signal.SIGSTOP)


def thaw(instance: Instance) -> None:
    """Let it go on."""
    instance.signal(signal.SIGCONT)
