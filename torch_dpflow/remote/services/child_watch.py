"""The processes of a node, and a thread that tells it at once that one of them has ended."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

#: How long the fork server may take to tell how a process has ended, seconds.
REAP_S = 0.5
#: What one has open in its node: two pipes to it, two descriptors of the process, and its connection.
DESCRIPTORS = 5


class Child:
    """A process that a fork server has made, known by the kernel's descriptor of it.

    multiprocessing knows it by a pipe to the fork server: where that one is killed it takes all of its processes for
    dead, and sends them no signal any more.
    """

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid = process.pid
        self._is_kernels = True
        try:
            #: Readable when it has ended.
            self.descriptor = os.pidfd_open(process.pid)
        except (
            OSError,
            AttributeError,
        ):  # it has ended, or an old kernel, or a sandbox that forbids the call
            self._is_kernels = False
            self.descriptor = os.dup(process.sentinel)

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether it has."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        return bool(poller.poll(max(0.0, within_s) * 1000))

    def kill(self) -> None:
        """End it at once; does not wait."""
        if self._is_kernels:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        else:
            self._process.kill()

    def bury(self) -> int | None:
        """Give back what is left of one that has ended; its exit code, None where nobody knows it."""
        self._process.join(REAP_S)  # the fork server reaps it first
        code = self._process.exitcode
        if code is not None:
            self._process.close()
        os.close(self.descriptor)
        return code


class ChildWatch:
    """A thread that waits for the end of processes.

    Args:
        ended: called in that thread when some have ended.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._added: list[int] = []
        self._closed = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="dpflow-children", daemon=True)
        self._thread.start()

    def add(self, child: Child) -> None:
        """Watch this process, too."""
        # A descriptor of our own: the process's is closed with it, and its number may come again.
        self._wake(os.dup(child.descriptor))

    def close(self) -> None:
        """End the thread; nothing is called from now on."""
        self._closed = True
        self._wake()
        self._thread.join()
        for descriptor in (self._wake_reader, self._wake_writer, *self._added):
            os.close(descriptor)

    def _wake(self, *added: int) -> None:
        with self._lock:
            self._added += added
        os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        watched: set[int] = set()
        try:
            while not self._closed:
                ready = wait([self._wake_reader, *watched])
                if self._wake_reader in ready:
                    ready.remove(self._wake_reader)
                    os.read(self._wake_reader, 4096)
                    with self._lock:
                        watched.update(self._added)
                        self._added = []
                for descriptor in ready:
                    assert isinstance(descriptor, int)
                    watched.remove(descriptor)
                    os.close(descriptor)
                if ready and not self._closed:
                    self._ended()
        finally:
            for descriptor in watched:
                os.close(descriptor)
