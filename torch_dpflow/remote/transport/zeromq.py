"""ZeroMQ's ROUTER and DEALER behind the transport contract: the only module that imports zmq.

Large frames go out without a copy (pyzmq keeps them alive until the io thread has written them), a frame that
came in goes out again by reference, and small ones are copied, which is cheaper than keeping book of them.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import zmq

from torch_dpflow.errors import OptionError, PeerLostError, StateError, TransportError
from torch_dpflow.remote.transport.base import Frame, TransportOptions, check_frames, check_identity

#: From this size on a frame is sent without a copy, bytes. Below it a memcpy is cheaper than the hand-over to
#: pyzmq's release thread.
ZERO_COPY_BYTES = 128 * 1024
#: Up to this size a received frame is copied, bytes: libzmq leaves it in a buffer that it shares with its
#: neighbours, which would live as long as it does.
DETACH_BYTES = 8 * 1024
#: Kernel buffers of an ipc socket, bytes: the default of 208 KiB costs a large frame many wake-ups.
IPC_KERNEL_BYTES = 2 * 1024 * 1024


class _Contexts:
    """One zmq context per process, alive while something uses it. Thread-safe; a fork starts from nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.SyncContext | None = None
        self._users = 0

    def take(self) -> zmq.SyncContext:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=1)
            self._users += 1
            return self._context

    def give(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._context is None:
                return
            context, self._context = self._context, None
        context.term()

    def forget(self) -> zmq.SyncContext | None:
        context = self._context
        self.__init__()  # type: ignore[misc]
        return context


_contexts = _Contexts()
_endpoints: weakref.WeakSet[_Endpoint] = weakref.WeakSet()
#: What a forked child holds of its parent's, for ever: collecting a pyzmq object calls into libzmq.
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    _inherited.append(_contexts.forget())
    for endpoint in list(_endpoints):
        endpoint._disown()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Endpoint:
    """What a ROUTER and a DEALER have in common: a socket, a way to wake it, frames in and out."""

    def __init__(self, kind: int, address: str, options: TransportOptions) -> None:
        self.address = address
        self.dropped = 0
        self._options = options
        self._closed = False
        self._foreign = False
        self._wake_lock = threading.Lock()
        self._context = _contexts.take()
        self._socket: zmq.SyncSocket = self._context.socket(kind)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll_set: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._wake_fd, zmq.POLLIN)]
        _endpoints.add(self)
        try:
            self._configure()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        options, socket = self._options, self._socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, options.max_frame_bytes)
        socket.setsockopt(zmq.SNDHWM, options.queue_messages)
        socket.setsockopt(zmq.RCVHWM, options.queue_messages)
        if self.address.startswith("ipc://"):
            socket.setsockopt(zmq.SNDBUF, IPC_KERNEL_BYTES)
            socket.setsockopt(zmq.RCVBUF, IPC_KERNEL_BYTES)
            return
        socket.setsockopt(zmq.IPV6, int("[" in self.address))
        socket.setsockopt(zmq.HEARTBEAT_IVL, math.ceil(options.silence_s * 1000 / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, math.ceil(options.silence_s * 1000))

    def _check_usable(self) -> None:
        if self._foreign:
            raise StateError(
                f"the socket of {self.address} was made before a fork and belongs to the parent; "
                "make one in the process that uses it"
            )
        if self._closed:
            raise PeerLostError(f"the socket of {self.address} is closed")

    def _await_input(self, timeout_s: float | None) -> bool:
        """Whether a message is there; False on a timeout and after `wake`."""
        timeout_ms = -1 if timeout_s is None else math.ceil(timeout_s * 1000)
        ready = zmq.zmq_poll(self._poll_set, timeout_ms)
        for item, _ in ready:
            if item is self._socket:
                return True
        if ready:
            os.eventfd_read(self._wake_fd)
        return False

    def _receive(self, timeout_s: float | None) -> list[memoryview] | None:
        """One message that keeps the limits; messages that do not are dropped and counted."""
        if self._closed or self._foreign:
            self._check_usable()
        deadline = None
        while True:
            try:
                first = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if timeout_s is not None:
                    deadline = deadline or time.monotonic() + timeout_s
                    timeout_s = max(0.0, deadline - time.monotonic())
                if timeout_s == 0 or not self._await_input(timeout_s):
                    return None
                continue
            frames = self._collect(first)
            if frames is not None:
                return frames

    def _collect(self, frame: zmq.Frame) -> list[memoryview] | None:
        frames = [_view(frame)]
        most = self._options.max_frames + 1  # a ROUTER puts the identity before them
        while frame.more:
            frame = self._socket.recv(copy=False)
            if len(frames) <= most:
                frames.append(_view(frame))
        if len(frames) > most:
            self.dropped += 1
            return None
        return frames

    def _send(self, frames: Sequence[Frame], flags: int) -> None:
        socket = self._socket
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            _send_frame(socket, frame, flags if position == last else flags | zmq.SNDMORE)

    def wake(self) -> None:
        with self._wake_lock:
            if not self._closed and not self._foreign:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        if not self._foreign:
            self._socket.close(linger=0)
            _contexts.give()

    def _disown(self) -> None:
        """In a forked child: leave the parent's socket alone."""
        self._foreign = True
        self._wake_lock = threading.Lock()
        _inherited.append(self._socket)

    def __del__(self) -> None:
        if hasattr(self, "_wake_fd"):
            self.close()


class ZeroMQListener(_Endpoint):
    """A bound ROUTER."""

    def __init__(self, address: str, options: TransportOptions) -> None:
        super().__init__(zmq.ROUTER, address, options)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"cannot listen at {address}: {error}; choose an address that is free"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _configure(self) -> None:
        super()._configure()
        # A send to a peer that is not there must say so, and a peer that comes back under its identity is the
        # same.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.BACKLOG, 1024)

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        while True:
            frames = self._receive(timeout_s)
            if frames is None:
                return None
            if len(frames) > 1:
                return bytes(frames[0]), frames[1:]
            self.dropped += 1  # an identity and nothing else: no connection of ours sends that

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        self._check_usable()
        check_frames(frames, self._options)
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        self._send(frames, zmq.NOBLOCK)
        return True


class ZeroMQConnection(_Endpoint):
    """A connected DEALER."""

    def __init__(self, address: str, identity: bytes | None, options: TransportOptions) -> None:
        # A chosen identity outlives a reconnect, so that the listener knows the peer again.
        self.identity = b"\x01" + secrets.token_bytes(15) if identity is None else identity
        check_identity(self.identity)
        super().__init__(zmq.DEALER, address, options)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise OptionError(f"cannot connect to {address!r}: {error}") from error

    def _configure(self) -> None:
        super()._configure()
        first, longest = self._options.reconnect_s
        self._socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, math.ceil(first * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, math.ceil(longest * 1000))

    def receive(self, timeout_s: float | None) -> list[memoryview] | None:
        return self._receive(timeout_s)

    def send(self, frames: Sequence[Frame]) -> None:
        self._check_usable()
        check_frames(frames, self._options)
        if not self._socket.poll(math.ceil(self._options.send_timeout_s * 1000), zmq.POLLOUT):
            raise PeerLostError(
                f"{self.address} took nothing for {self._options.send_timeout_s} s and "
                f"{self._options.queue_messages} messages wait; is its process alive?"
            )
        self._send(frames, zmq.NOBLOCK)


def _view(frame: zmq.Frame) -> memoryview:
    view = frame.buffer
    return view if view.nbytes > DETACH_BYTES else memoryview(bytearray(view))


def _send_frame(socket: zmq.SyncSocket, frame: Frame, flags: int) -> None:
    if isinstance(frame, memoryview):
        owner = frame.obj
        if isinstance(owner, zmq.Frame) and len(owner) == frame.nbytes:
            socket.send(owner, flags)
            return
        size = frame.nbytes
    else:
        size = len(frame)
    socket.send(frame, flags, copy=size < ZERO_COPY_BYTES)
