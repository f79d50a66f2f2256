"""An object on its way into a new process, opened only where its failure to open can be told."""

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Sealed:
    """Carries `value` to a process that multiprocessing starts.

    Under fork it stays the object that it is. Where a process is started afresh, multiprocessing pickles it, and
    unpickles it before any code of ours runs there: an import that fails would end the process with a
    traceback that nobody catches. So the value is pickled inside, and `open` unpickles it.
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
        # During the start of a process: locks and file descriptors may be pickled only then.
        return bytes(ForkingPickler.dumps(self._value))

    def __setstate__(self, pickled: bytes) -> None:
        self._value, self._pickled = None, pickled
