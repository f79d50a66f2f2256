"""A coordinator's state: in memory, and written behind to its state store, so that reading never waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.services.state_store import RENEW_S, StateStore
from torch_dpflow.errors import StateError
from torch_dpflow.log import SERVICE


class WriteBehindStore:
    """Bytes by key, all of them in memory. A thread writes them to a store whenever that can be used.

    A value survives this process once the thread has written it, a moment after `put`. A store that was away, or has
    been emptied, receives everything again. All methods except `load` belong to one thread.

    Args:
        open_store: opens the store, or raises StateError.
        owner: of the store, as of `StateStore.renew`.
    """

    # Written behind, so that a store that is away blocks nobody. What was put in the last moment before this process
    # died may be lost; a job whose flow is unknown then registers it again.

    def __init__(self, open_store: Callable[[], StateStore], owner: str) -> None:
        self._open_store = open_store
        self._store: StateStore
        self._owner = owner
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        #: Keys whose value in the store is out of date.
        self._unwritten: set[str] = set()
        self._awaiting: queue.SimpleQueue[Callable[[Exception | None], None]] = queue.SimpleQueue()
        self._writer = PeriodicCall(self._write, RENEW_S, "dpflow-state", on_error=self._log_failure)
        self._loaded = threading.Event()
        #: Why the store could not be used when it was last tried; None if it could. That is logged once.
        self.failure: Exception | None = None

    def load(self, meanwhile: Callable[[], None]) -> None:
        """Read everything from the store, once that can be used. To be called once, before all others.

        meanwhile: called again and again until then; is to wait for a moment.
        """
        self._writer.wake()
        self._writer.start()
        while not self._loaded.is_set():
            meanwhile()

    def get(self, key: str) -> bytes | None:
        """The value of `key`; None if there is none."""
        return self._values.get(key)

    def find(self, prefix: str = "") -> list[str]:
        """Every key that begins with `prefix`, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def put(self, key: str, value: bytes) -> None:
        """Set the value of `key`."""
        with self._lock:
            self._values[key] = value
            self._unwritten.add(key)
        self._writer.wake()

    def delete(self, key: str) -> None:
        """Remove `key`, if it is there."""
        with self._lock:
            self._values.pop(key, None)
            self._unwritten.add(key)
        self._writer.wake()

    def once_written(self, done: Callable[[Exception | None], None]) -> None:
        """Have the thread call `done` when the store has all that was put so far, or with why it cannot be used."""
        self._awaiting.put(done)
        self._writer.wake()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        awaiting = [self._awaiting.get() for _ in range(self._awaiting.qsize())]
        failure: Exception | None = None
        try:
            if not self._loaded.is_set():
                self._read_all()
            self._write_all()
            self._log_recovery()
        except Exception as error:
            failure = error
            raise
        finally:
            for done in awaiting:
                done(failure)

    def _read_all(self) -> None:
        self._store = self._open_store()
        try:
            self._store.renew(self._owner)
            for key in self._store.find():
                value = self._store.get(key)
                if value is not None:
                    self._values[key] = value
        except BaseException:
            self._store.close()
            raise
        self._loaded.set()

    def _write_all(self) -> None:
        if not self._store.renew(self._owner):
            SERVICE.warning("state store was emptied; all state is written again")
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

    def _log_failure(self, error: Exception) -> None:
        if self.failure is None:
            text = "%s; jobs read on, changes are written once it recovers"
            SERVICE.warning(text, error, exc_info=None if isinstance(error, StateError) else error)
        self.failure = error

    def _log_recovery(self) -> None:
        if self.failure is not None:
            self.failure = None
            SERVICE.warning("state store recovered; all state is written")
