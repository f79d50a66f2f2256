"""Two listeners as one: CURVE and its authenticator belong to a whole socket, so one cannot serve ipc and tcp."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import zmq

from torch_dpflow.ipc.messages.headers import Frame
from torch_dpflow.ipc.transport.zeromq.sockets import LOOK_S, ZeroMQListener


class JoinedListener:
    """Receives from either of two listeners, which it closes.

    Args:
        first, second: the listeners. Their own `watch` and `wake` may still be used.
        is_of_second: whether a peer, by its identity, is connected to the second. Messages that arrive at the wrong one
            are dropped, since the answers to them would be lost.
    """

    def __init__(self, first: ZeroMQListener, second: ZeroMQListener, is_of_second: Callable[[bytes], bool]) -> None:
        self._turns = [first, second]
        self._first, self._second = first, second
        self._sockets = first.poll_set[0][0], second.poll_set[0][0]
        self._is_of_second = is_of_second
        self.address = first.address
        self.dropped = self.losses = 0
        #: Messages that arrived at the wrong one.
        self._astray = 0
        self.watch, self.unwatch, self.wake = first.watch, first.unwatch, first.wake

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """As `Listener.receive`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._next()
            if message is not None or timeout_s == 0:
                return message
            if self._first.refuses or self._second.refuses:
                timeout_s = LOOK_S if timeout_s is None else min(timeout_s, LOOK_S)
            timeout_ms = -1 if timeout_s is None else math.ceil(timeout_s * 1000)
            ready = zmq.zmq_poll([*self._first.poll_set, *self._second.poll_set], timeout_ms)
            if not ready or any(item not in self._sockets for item, _ in ready):
                message = self._next()
                if message is None:
                    self._settle()
                return message
            if deadline is not None:  # all that has come was dropped
                timeout_s = max(0.0, deadline - time.monotonic())

    def _settle(self) -> None:
        self._first.settle()
        self._second.settle()
        self.losses = self._first.losses + self._second.losses

    def _next(self) -> tuple[bytes, list[memoryview]] | None:
        """Return a message that has arrived; the listeners take turns."""
        message = None
        self._turns.reverse()
        for listener in self._turns:
            is_second = listener is self._second
            while (message := listener.receive(0)) is not None and self._is_of_second(message[0]) != is_second:
                self._astray += 1
            if message is not None:
                break
        self.dropped = self._astray + self._first.dropped + self._second.dropped
        return message

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """As `Listener.send`."""
        return (self._second if self._is_of_second(peer) else self._first).send(peer, frames)

    def close(self) -> None:
        """As `Listener.close`."""
        self._first.close()
        self._second.close()
