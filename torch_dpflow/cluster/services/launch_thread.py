"""Thread that starts the processes of a node: a start that waits must not keep the node from answering."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch_dpflow.workers.platform import Handle, Platform, ProcessSpec

#: How long the end of the thread may take before a start that waits is ended, and how long afterwards, seconds.
GRACE_S, END_S = 0.5, 2.0


class LaunchThread:
    """Starts processes one after the other.

    Args:
        platform: starts them. Its user closes it after this thread.
        report: called in the thread with the outcome of each launch.
    """

    def __init__(self, platform: Platform, report: Callable[[ProcessSpec, Handle | Exception], None]) -> None:
        self._platform, self._report = platform, report
        self._specs: queue.SimpleQueue[ProcessSpec | None] = queue.SimpleQueue()
        self._closes = False
        self._thread = threading.Thread(target=self._run, name="dpflow-launch", daemon=True)
        self._thread.start()

    def launch(self, spec: ProcessSpec) -> None:
        """Start a process soon."""
        self._specs.put(spec)

    def close(self) -> None:
        """Start nothing more, end a start that waits, and wait for the thread. Idempotent."""
        self._closes = True
        self._specs.put(None)
        self._thread.join(GRACE_S)
        self._platform.interrupt()
        self._thread.join(END_S)

    def _run(self) -> None:
        while (spec := self._specs.get()) is not None and not self._closes:
            try:
                outcome: Handle | Exception = self._platform.launch(spec)
            except Exception as error:
                outcome = error
            self._report(spec, outcome)
