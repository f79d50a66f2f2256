"""Sends a worker's results to its shard: slow ones at once, fast ones in groups.

A single result costs a shard three times the processor time of one in a group: on a busy machine it begins with cold
caches, and so does the decoder afterwards. The code of shard, job and worker around a sample takes some 100 µs alone;
beside decoders, on two cores, it took 700 µs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from torch_dpflow.ipc.messages.headers import Exchange, Finished, PackedExchange, encode
from torch_dpflow.ipc.transport import Connection, Frame

#: Most results of a message; most frames and bytes, shared memory included, of a message of several results.
MAX_RESULTS, MAX_FRAMES, MAX_BYTES = 16, 128, 8 << 20
#: The longest wait of a result for others, seconds: the time of ten small samples. With 8 results and 20 ms a shard
#: took a fifth more processor time.
HOLD_S = 0.06
#: The time after which results are sent although the worker still loads the next sample, seconds.
LATE_S = 0.1


class ResultOutbox:
    """Sends a worker's results. One thread at a time uses the connection.

    `add` and `flush` are for the worker's thread; a thread of the outbox sends results that have waited too long. It is
    no `PeriodicCall`, as it must not wake up beside the decoder while no result waits.

    Args:
        connection: to the shard. Other users of it must hold `lock` while results wait.
        hold_s: as HOLD_S.
        late_s: as LATE_S.
        compress: compresses frames; None: they are sent unchanged.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        hold_s: float = HOLD_S,
        late_s: float = LATE_S,
        compress: Callable[[Sequence[Frame]], tuple[list[Frame], list[int]]] | None = None,
    ) -> None:
        self._compress = compress
        self._connection = connection
        self._hold_s, self._late_s = hold_s, late_s
        self.lock = threading.Lock()
        self._finished: list[Finished] = []
        self._frames: list[Frame] = []
        self._nbytes = 0
        #: The task that the worker has run since the latest result.
        self._started: int | None = None
        self._sent_at = -math.inf
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_late, name="dpflow-results", daemon=True)
        self._thread.start()

    def add(self, finished: Finished, frames: Sequence[Frame], started: int | None, *, hold: bool) -> None:
        """Send a result, now or with later ones. The frames must not change until they are sent.

        started: the task that the worker runs next. hold: whether the result may wait for others.
        """
        with self.lock:
            if self._finished and len(self._frames) + len(frames) > MAX_FRAMES:
                self._send()
            self._finished.append(finished)
            self._frames += frames
            self._nbytes += finished.payload.nbytes
            self._started = started
            full = len(self._finished) == MAX_RESULTS or self._nbytes >= MAX_BYTES
            if hold and not full and time.monotonic() - self._sent_at < self._hold_s:
                self._waiting.set()
            else:
                self._send()

    def flush(self) -> None:
        """Send the waiting results; if there are none, report that the worker is idle."""
        with self.lock:
            self._started = None
            self._send()

    def close(self) -> None:
        """Drop the waiting results and end the thread."""
        with self.lock:
            self._finished, self._frames = [], []
        self._closed.set()
        self._waiting.set()
        self._thread.join()

    def _send(self) -> None:
        finished, self._finished = self._finished, []
        frames, self._frames, self._nbytes = self._frames, [], 0
        self._sent_at = time.monotonic()
        header: Exchange | PackedExchange = Exchange(finished, self._started)
        if self._compress is not None:
            frames, sizes = self._compress(frames)
            if sizes:
                header = PackedExchange(finished, self._started, sizes)
        self._connection.send([encode(header), *frames])

    def _send_late(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait()
            self._closed.wait(self._late_s)
            with self.lock:
                if not self._finished:
                    self._waiting.clear()
                elif time.monotonic() - self._sent_at >= self._late_s:
                    self._send()
