"""Unpickles an object in a new process only where an error of that can be reported."""

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any


class DeferredPickle:
    """Carries `value` to a process that multiprocessing starts.

    A forked process gets the object itself. For any other start method multiprocessing pickles the target's arguments
    and unpickles them before any code of ours runs, where a failing import would end the process with a traceback that
    nobody catches. So this class pickles the value by itself, and `open` unpickles it.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._pickled: bytes | None = None

    def open(self) -> Any:
        """The value. Raises whatever unpickling it raises."""
        if self._pickled is not None:
            self._value, self._pickled = pickle.loads(self._pickled), None
        return self._value

    def __getstate__(self) -> bytes:
        # ForkingPickler, while a process is being started: locks and file descriptors can be pickled only then.
        return bytes(ForkingPickler.dumps(self._value))

    def __setstate__(self, pickled: bytes) -> None:
        self._value, self._pickled = None, pickled
