"""What a coordinator keeps, in memory and behind that in its state store: reading waits for no store."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torch_dpflow.errors import StateError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.services.state_store import RENEW_S, StateStore

#: How long to wait before a store that cannot be used is tried again, seconds.
RETRY_S = 1.0


class WriteBehindStore:
    """Bytes by key, all of them in memory. A thread writes them to a store as soon as that can be used.

    What has been put survives this process once the thread has come to it, a moment later. A store that is away, or
    that somebody has emptied, is given everything again. Methods but `load` belong to one thread.

    Args:
        open_store: opens the store, or raises StateError.
        owner: of the store, as of `StateStore.renew`.
    """

    def __init__(self, open_store: Callable[[], StateStore], owner: str) -> None:
        self._open_store = open_store
        self._store: StateStore
        self._owner = owner
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        #: What the store does not have, or has and should not.
        self._unwritten: set[str] = set()
        self._awaiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Event()
        self._complained = False

    def load(self, waiting: Callable[[], None]) -> None:
        """Take up what the store holds, as soon as it can be used. To be called first of all.

        waiting: called again and again while it cannot.
        """
        while True:
            try:
                self._store = self._open_store()
                self._store.renew(self._owner)
                for key in self._store.find():
                    value = self._store.get(key)
                    if value is not None:
                        self._values[key] = value
                break
            except StateError as error:
                self._complain(error)
                waiting()
                time.sleep(RETRY_S)
        self._relieve()
        threading.Thread(target=self._write, name="dpflow-state", daemon=True).start()

    def get(self, key: str) -> bytes | None:
        """The value of `key`; None where there is none."""
        return self._values.get(key)

    def find(self, prefix: str = "") -> list[str]:
        """Every key that begins with `prefix`, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def put(self, key: str, value: bytes) -> None:
        """Set the value of `key`."""
        with self._lock:
            self._values[key] = value
            self._unwritten.add(key)
        self._changed.set()

    def delete(self, key: str) -> None:
        """Remove `key`, if it is there."""
        with self._lock:
            self._values.pop(key, None)
            self._unwritten.add(key)
        self._changed.set()

    def once_written(self, done: Callable[[], None]) -> None:
        """Have `done` called, in the thread, when the store has what has been put so far, or cannot be used."""
        self._awaiting.put(done)
        self._changed.set()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            self._changed.wait(RENEW_S)
            self._changed.clear()
            awaiting = [self._awaiting.get() for _ in range(self._awaiting.qsize())]
            try:
                self._write_once()
            except Exception as error:  # whatever it is, what is known is written in the end
                self._complain(error)
                self._changed.set()
            else:
                self._relieve()
            for done in awaiting:
                done()
            if self._complained:
                time.sleep(RETRY_S)

    def _write_once(self) -> None:
        if not self._store.renew(self._owner):
            SERVICE.warning("the state store has been emptied; what is known is written again")
            with self._lock:
                self._unwritten |= self._values.keys()
        with self._lock:
            unwritten = list(self._unwritten)
        for key in unwritten:
            with self._lock:
                self._unwritten.discard(key)
                value = self._values.get(key)
            try:
                if value is None:
                    self._store.delete(key)
                else:
                    self._store.put(key, value)
            except BaseException:
                with self._lock:
                    self._unwritten.add(key)
                raise

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            text = "%s; jobs read on, and what changes is kept when it can be used again"
            SERVICE.warning(text, error, exc_info=None if isinstance(error, StateError) else error)

    def _relieve(self) -> None:
        if self._complained:
            self._complained = False
            SERVICE.warning("the state store can be used again, and has what is known")
