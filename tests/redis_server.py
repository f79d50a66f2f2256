"""A Redis server of a test's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.missing_parts import NO_REDIS, find_redis
from tests.shared_cluster import wait
from tests.worker_cases import has_ended


class RedisServer:
    """Runs at a socket in `folder`, no child of the test, keeps nothing on disk; can be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = f"{folder}/redis"
        self._pid_file = folder / "redis.pid"
        self._pid = 0
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        program = find_redis()
        if program is None:
            pytest.skip(NO_REDIS)
        command = [
            program,
            "--port",
            "0",
            "--unixsocket",
            self._socket,
            "--save",
            "",
            "--daemonize",
            "yes",
        ]
        command += ["--pidfile", str(self._pid_file), "--dir", str(self._folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wait(self._answers, what="the Redis server")
        self._pid = int(self._pid_file.read_text())

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def stop(self) -> None:
        """What it held is gone."""
        os.kill(self._pid, signal.SIGKILL)
        wait(lambda: has_ended(self._pid), what="the end of the Redis server")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.connect(self._socket)
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG") and self._pid_file.exists()
        return False
