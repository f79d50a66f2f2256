"""What a worker has to tell its shard: at once where that takes long to come, several results together where not.

A result that comes by itself costs a shard three times what it costs among others: on a busy machine the processor's
caches hold nothing of the shard by then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from torch_dpflow.remote.transport import Connection, Frame
from torch_dpflow.remote.wire.headers import Exchange, Finished, encode

#: Most results of one message; most frames, and bytes in them and in shared memory, where there are several.
TOGETHER, FRAMES_TOGETHER, BYTES_TOGETHER = 16, 128, 8 << 20
#: How long a result waits for others, seconds: as long as ten small samples take. With 8 and 20 ms the shard took a
#: fifth more processor time. It costs latency where the design asks for little, and buys throughput.
HOLD_S = 0.06
#: When results go although the worker is at the next sample still, seconds.
LATE_S = 0.1


class ResultOutbox:
    """Sends a worker's results, and keeps its connection to one thread at a time.

    `add` and `flush` are for the worker's thread; a thread of the outbox sends what has become late.

    Args:
        connection: to the shard. Whoever else uses it while results wait holds `lock`.
        hold_s: how long a result waits for others, seconds.
        late_s: after how many seconds results go although the worker is at the next sample still.
    """

    def __init__(self, connection: Connection, *, hold_s: float = HOLD_S, late_s: float = LATE_S) -> None:
        self._connection = connection
        self._hold_s, self._late_s = hold_s, late_s
        self.lock = threading.Lock()
        self._finished: list[Finished] = []
        self._frames: list[Frame] = []
        self._nbytes = 0
        #: What the worker is at since the latest result.
        self._started: int | None = None
        self._sent_at = -math.inf
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_late, name="dpflow-results", daemon=True)
        self._thread.start()

    def add(self, finished: Finished, frames: Sequence[Frame], started: int | None, *, hold: bool) -> None:
        """Tell of a result. The frames must not change until they are sent.

        started: the task that the worker is at now. hold: whether it may wait for others.
        """
        with self.lock:
            if self._finished and len(self._frames) + len(frames) > FRAMES_TOGETHER:
                self._send()
            self._finished.append(finished)
            self._frames += frames
            self._nbytes += finished.parcel.nbytes
            self._started = started
            full = len(self._finished) == TOGETHER or self._nbytes >= BYTES_TOGETHER
            if hold and not full and time.monotonic() - self._sent_at < self._hold_s:
                self._waiting.set()
            else:
                self._send()

    def flush(self) -> None:
        """Send what waits, or, where nothing does, that the worker has nothing to do."""
        with self.lock:
            self._started = None
            self._send()

    def close(self) -> None:
        """Nobody wants what waits; nothing is sent any more."""
        with self.lock:
            self._finished, self._frames = [], []
        self._closed.set()
        self._waiting.set()
        self._thread.join()

    def _send(self) -> None:
        finished, self._finished = self._finished, []
        frames, self._frames, self._nbytes = self._frames, [], 0
        self._sent_at = time.monotonic()
        self._connection.send([encode(Exchange(finished, self._started)), *frames])

    def _send_late(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait()
            self._closed.wait(self._late_s)
            with self.lock:
                if not self._finished:
                    self._waiting.clear()
                elif time.monotonic() - self._sent_at >= self._late_s:
                    self._send()
