"""Tells a node at once that one of its processes has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess


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

    def add(self, child: BaseProcess) -> None:
        """Watch this process, too. It must not be closed before `ended` has been called for it."""
        # A descriptor of our own: the process's is closed with it, and its number may come again.
        self._wake(os.dup(child.sentinel))

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
