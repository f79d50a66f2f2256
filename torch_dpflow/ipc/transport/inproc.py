"""A transport inside one process, for tests, without sockets.

Every message is copied once, so that neither side sees the other's later writes.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from torch_dpflow.errors import PeerLostError, StateError, TransportError
from torch_dpflow.ipc.messages.payload_table import Frame
from torch_dpflow.ipc.transport.base import TransportOptions, check_frames, check_identity

#: How often a listener polls its watched descriptors, seconds.
_WATCH_S = 0.01


class _Exchange:
    """The listener and the connections of one address. `changed` guards every attribute and signals every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.listener: InprocListener | None = None
        self.peers: dict[bytes, InprocConnection] = {}
        #: Messages on their way to the listener, in order of sending.
        self.inbox: deque[tuple[bytes, list[memoryview]]] = deque()
        #: How many of them are each peer's.
        self.waiting: Counter[bytes] = Counter()


_exchanges: dict[str, _Exchange] = {}
_exchanges_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _exchanges_lock
    _exchanges_lock = threading.Lock()
    _exchanges.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _InprocEndpoint:
    """The base of both sides: waits on the exchange, and can be woken."""

    def __init__(self, address: str, options: TransportOptions) -> None:
        self.address = address
        self.dropped = 0
        self._options = options
        self._pid = os.getpid()
        self._closed = False
        self._woken = False
        with _exchanges_lock:
            self._exchange = _exchanges.setdefault(address, _Exchange())

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(f"{self.address} was made before a fork and belongs to the parent; make it anew")
        if self._closed:
            raise PeerLostError(f"{self.address} is closed")

    def _await(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """With `changed` held: wait for `ready`; False on a timeout and after `wake`."""
        if not ready() and timeout_s != 0:
            self._exchange.changed.wait_for(lambda: ready() or self._woken, timeout_s)
            if not ready():
                self._woken = False
        return ready()

    def _keeps_limits(self, frames: list[memoryview]) -> bool:
        if max(frame.nbytes for frame in frames) > self._options.max_frame_bytes:
            return False
        if len(frames) > self._options.max_frames:
            self.dropped += 1
            return False
        return True

    def wake(self) -> None:
        if os.getpid() == self._pid:
            with self._exchange.changed:
                self._woken = True
                self._exchange.changed.notify_all()


class InprocListener(_InprocEndpoint):
    """The listening side of an address."""

    losses = 0

    def __init__(self, address: str, options: TransportOptions) -> None:
        super().__init__(address, options)
        self._watched = select.poll()
        self._watching = 0
        with self._exchange.changed:
            if self._exchange.listener is not None:
                raise TransportError(
                    f"cannot listen at {address}: it is taken; choose an address that is free"
                )
            self._exchange.listener = self

    def watch(self, descriptor: int) -> None:
        self._watched.register(descriptor, select.POLLIN)
        self._watching += 1

    def unwatch(self, descriptor: int) -> None:
        self._watched.unregister(descriptor)
        self._watching -= 1

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        self._check_usable()
        exchange = self._exchange
        with exchange.changed:
            while self._await_message(timeout_s):
                peer, frames = exchange.inbox.popleft()
                exchange.waiting[peer] -= 1
                exchange.changed.notify_all()
                if self._keeps_limits(frames):
                    return peer, frames
        return None

    def _await_message(self, timeout_s: float | None) -> bool:
        """With `changed` held: wait for a message; False on a timeout, after `wake`, for a watched descriptor."""
        inbox = self._exchange.inbox
        if not self._watching:
            return self._await(lambda: bool(inbox), timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not inbox and not self._watched.poll(0) and (end is None or time.monotonic() < end):
            if self._woken:
                self._woken = False
                break
            self._exchange.changed.wait(_WATCH_S)
        return bool(inbox)

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        self._check_usable()
        check_frames(frames, self._options)
        exchange = self._exchange
        with exchange.changed:
            connection = exchange.peers.get(peer)
            if connection is None or len(connection._inbox) >= self._options.queue_messages:
                return False
            connection._inbox.append(_copies(frames))
            exchange.changed.notify_all()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        with self._exchange.changed:
            self._exchange.listener = None
            self._exchange.inbox.clear()
            self._exchange.waiting.clear()
            self._exchange.changed.notify_all()


class InprocConnection(_InprocEndpoint):
    """The connecting side of an address."""

    def __init__(self, address: str, identity: bytes | None, options: TransportOptions) -> None:
        self.identity = b"\x01" + secrets.token_bytes(15) if identity is None else identity
        check_identity(self.identity)
        super().__init__(address, options)
        self._inbox: deque[list[memoryview]] = deque()
        with self._exchange.changed:
            self._exchange.peers[self.identity] = self

    def receive(self, timeout_s: float | None) -> list[memoryview] | None:
        self._check_usable()
        with self._exchange.changed:
            while self._await(lambda: bool(self._inbox), timeout_s):
                frames = self._inbox.popleft()
                if self._keeps_limits(frames):
                    return frames
        return None

    def send(self, frames: Sequence[Frame]) -> None:
        self._check_usable()
        check_frames(frames, self._options)
        exchange, limit = self._exchange, self._options.queue_messages
        with exchange.changed:
            has_room = exchange.changed.wait_for(
                lambda: exchange.waiting[self.identity] < limit, self._options.send_timeout_s
            )
            if not has_room:
                raise PeerLostError(f"{self.address} took nothing for {self._options.send_timeout_s} s")
            exchange.inbox.append((self.identity, _copies(frames)))
            exchange.waiting[self.identity] += 1
            exchange.changed.notify_all()

    def close(self, *, linger_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        with self._exchange.changed:
            if self._exchange.peers.get(self.identity) is self:
                del self._exchange.peers[self.identity]
            self._exchange.changed.notify_all()


def _copies(frames: Sequence[Frame]) -> list[memoryview]:
    return [memoryview(bytearray(frame)) for frame in frames]
