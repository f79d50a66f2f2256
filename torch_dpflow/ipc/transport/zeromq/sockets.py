"""Listener and connection over ZeroMQ's ROUTER and DEALER.

Large frames are sent without a copy: pyzmq keeps them alive until the io thread has written them. A received frame is
forwarded by reference. Small frames are copied, which costs less than tracking when they were sent.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from torch_dpflow._core import descriptors
from torch_dpflow._core.checks import is_loopback
from torch_dpflow.errors import OptionError, PeerLostError, StateError, TransportError
from torch_dpflow.ipc.messages.headers import Frame
from torch_dpflow.ipc.transport.base import (
    ClientKeys,
    ServerKeys,
    TransportOptions,
    WorkerKeys,
    check_frames,
    check_identity,
)
from torch_dpflow.ipc.transport.zeromq import contexts
from torch_dpflow.log import TRANSPORT

#: A larger frame is sent without a copy, bytes. Below it a memcpy is cheaper than pyzmq's release thread.
ZERO_COPY_BYTES = 128 * 1024
#: Up to this size a received frame is copied, bytes: libzmq leaves it in a buffer with other frames, all of which it
#: would keep alive.
DETACH_BYTES = 8 * 1024
#: Kernel buffers of a socket on one host, bytes: messages in flight stay in the processor's cache, which is a fifth
#: faster than with the kernel's default. Between hosts the default is better.
LOCAL_KERNEL_BYTES = 256 * 1024
#: How many descriptors a socket has open: its own or its first connection's, and those that wake it.
SOCKET_DESCRIPTORS = 4
#: How often an ipc listener checks that there are descriptors for new connections, and how often it logs that there are
#: none, seconds.
LOOK_S, COMPLAIN_S = 0.002, 10.0
#: How long a new listener waits for an address in use, seconds: libzmq's thread closes sockets asynchronously.
REBIND_S = 0.2
#: Added to the path of a listener that accepts no connections for now.
_ASIDE = "~"
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class _SocketEndpoint:
    """Base class of both sides: a socket, a way to wake it, frames in and out."""

    def __init__(
        self, kind: int, address: str, options: TransportOptions, context: zmq.SyncContext | None = None
    ) -> None:
        self.address = address
        self.dropped = 0
        self._options = options
        self._closed = False
        self._foreign = False
        #: Reentrant: a signal handler that calls `wake` may interrupt `close` in its thread.
        self._wake_lock = threading.RLock()
        #: None: it uses the shared one.
        self._own_context = context
        descriptors.require(SOCKET_DESCRIPTORS, f"a socket for {address}")
        self._context = context or contexts.shared.take()
        self._socket: zmq.SyncSocket = self._context.socket(kind)
        #: Reports connections that end, with `WorkerKeys`.
        self._monitor: zmq.SyncSocket | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: What `receive` waits for.
        self.poll_set: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._wake_fd, zmq.POLLIN)]
        contexts.inheritable.add(self)
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
        if not self.address.startswith("tcp://") or is_loopback(self.address):
            socket.setsockopt(zmq.SNDBUF, LOCAL_KERNEL_BYTES)
            socket.setsockopt(zmq.RCVBUF, LOCAL_KERNEL_BYTES)
        if self.address.startswith("tcp://"):
            self._configure_tcp()

    def _configure_tcp(self) -> None:
        options, socket = self._options, self._socket
        socket.setsockopt(zmq.IPV6, int("[" in self.address))
        socket.setsockopt(zmq.HEARTBEAT_IVL, math.ceil(options.silence_s * 1000 / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, math.ceil(options.silence_s * 1000))
        if options.keys is None and not is_loopback(self.address):
            raise OptionError(
                f"{self.address} reaches beyond this host and `keys` is None: any peer that connects could run "
                "code. Give the keys of the cluster, or use tcp://127.0.0.1 or ipc://"
            )

    def _check_usable(self) -> None:
        if self._foreign:
            raise StateError(
                f"the socket of {self.address} was made before a fork and belongs to the parent; "
                "make one in the process that uses it"
            )
        if self._closed:
            raise PeerLostError(f"the socket of {self.address} is closed")

    def _await_input(self, timeout_s: float | None) -> bool:
        """Wait; return True if a message has arrived, False on a timeout, after `wake` or for a watched descriptor."""
        timeout_ms = -1 if timeout_s is None else math.ceil(timeout_s * 1000)
        woken = False
        for item, _ in zmq.zmq_poll(self.poll_set, timeout_ms):
            if item is self._socket:
                return True
            woken = woken or item == self._wake_fd
            if item is self._monitor:
                self._note_losses()
        if woken:
            os.eventfd_read(self._wake_fd)
        return False

    def _receive(self, timeout_s: float | None) -> list[memoryview] | None:
        """Wait and return one message within the limits; other messages are dropped and counted."""
        if self._closed or self._foreign:
            self._check_usable()
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while True:
            if timeout_s == 0:
                # Raising zmq.Again where no message is there takes three times as long.
                if not int(self._socket.get(_EVENTS)) & _POLLIN:
                    return None
            elif not self._await_input(timeout_s):
                return None
            try:
                frames = self._collect(self._socket.recv(_NOBLOCK, copy=False))
            except zmq.Again:  # its peer has disconnected meanwhile
                frames = None
            if frames is not None:
                return frames
            if deadline is not None:
                timeout_s = max(0.0, deadline - time.monotonic())

    def _note_losses(self) -> None:
        """Count the ended connections that the socket's monitor reports."""

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

    def _send(self, frames: Sequence[Frame]) -> None:
        """Queue a message. Raises zmq.Again, before any frame is sent, if the queue is full."""
        socket = self._socket
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            _send_frame(socket, frame, _NOBLOCK if position == last else _NOBLOCK | _SNDMORE)

    def wake(self) -> None:
        with self._wake_lock:
            if not self._closed and not self._foreign:
                os.eventfd_write(self._wake_fd, 1)

    def close(self, *, linger_s: float = 0.0) -> None:
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        if not self._foreign:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
            self._socket.close(linger=math.ceil(linger_s * 1000))
            if self._own_context is None:
                contexts.shared.give_back()
            else:
                self._own_context.term()

    def disown(self) -> list[object]:
        """Make this object unusable in a forked child; return the parent's objects, which must never be collected."""
        self._foreign = True
        self._wake_lock = threading.RLock()
        return [self._socket, self._own_context, self._monitor]

    def __del__(self) -> None:
        if hasattr(self, "_wake_fd"):
            self.close()


class ZeroMQListener(_SocketEndpoint):
    """`Listener` over a bound ROUTER socket."""

    def __init__(self, address: str, options: TransportOptions) -> None:
        context, keys = None, options.keys
        if address.startswith("tcp://") and isinstance(keys, ServerKeys | WorkerKeys):
            context = contexts.guarded_context(keys)
        self._worker_keys = keys if isinstance(keys, WorkerKeys) else None
        self._losses = 0
        #: Whether the listener accepts no new connections for now, for lack of descriptors.
        self.refuses = False
        super().__init__(zmq.ROUTER, address, options, context)
        self._complain_at = 0.0
        # Over tcp libzmq itself waits for a descriptor.
        self._look_at = 0.0 if address.startswith("ipc://") else math.inf
        try:
            self._bind()
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise TransportError(
                f"cannot listen at {address}: {error}; choose an address of this host that is free"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._worker_keys is not None:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self.poll_set.append((self._monitor, zmq.POLLIN))

    @property
    def losses(self) -> int:
        if self._monitor is not None:
            self._note_losses()
        return self._losses

    @property
    def sources(self) -> list[Any]:
        """Sources that another listener of the same thread must `watch`, so that one wait serves both."""
        return [source for source, _ in self.poll_set if source != self._wake_fd]

    def _bind(self) -> None:
        # A listener of this process that was just closed holds its address until libzmq's thread has closed it too, and
        # that would remove the file of a new listener.
        deadline = time.monotonic() + REBIND_S
        while True:
            last = time.monotonic() > deadline
            try:
                if self.address.startswith("ipc:///"):
                    contexts.check_path(self.address.removeprefix("ipc://"), take_leftover=last)
                self._socket.bind(self.address)
                return
            except (OSError, zmq.ZMQError) as error:
                if error.errno != errno.EADDRINUSE or last:
                    raise
            time.sleep(0.005)

    def _configure(self) -> None:
        super()._configure()
        # A send to an unknown peer has to fail, and a peer that reconnects under its identity replaces its old
        # connection.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.BACKLOG, 1024)

    def _configure_tcp(self) -> None:
        super()._configure_tcp()
        keys = self._options.keys
        if isinstance(keys, ServerKeys | WorkerKeys):
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, contexts.ZAP_DOMAIN)
        elif keys is not None:
            raise OptionError("a listener needs ServerKeys (ConnectionFile.server_keys()), not ClientKeys")

    def watch(self, source: Any) -> None:
        self.poll_set.append((source, zmq.POLLIN))

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        while True:
            if time.monotonic() >= self._look_at:
                self._check_usable()
                self._look_after_descriptors()
            if self.refuses:
                timeout_s = LOOK_S if timeout_s is None else min(timeout_s, LOOK_S)
            frames = self._receive(timeout_s)
            if frames is None:
                return None
            if len(frames) > 1:
                return bytes(frames[0]), frames[1:]
            self.dropped += 1  # an identity without frames, which no connection of ours sends

    def _note_losses(self) -> None:
        assert self._monitor is not None
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._losses += 1

    def _collect(self, frame: zmq.Frame) -> list[memoryview] | None:
        # libzmq lets an accepted peer have any identity, also another's.
        is_own = self._worker_keys is None or self._worker_keys.admits(str(frame.get("User-Id")), frame.bytes)
        frames = super()._collect(frame)
        if is_own or frames is None:
            return frames
        self.dropped += 1
        return None

    def _look_after_descriptors(self) -> None:
        self._look_at = time.monotonic() + LOOK_S
        path = self.address.removeprefix("ipc://")
        if descriptors.has_spare(descriptors.SPARE):
            if self.refuses:
                os.replace(path + _ASIDE, path)
                self.refuses = False
        elif not self.refuses:
            # libzmq aborts the process where it has no descriptor for a connection. With the file renamed, new peers
            # fail and retry; unbinding would disconnect the others too.
            os.replace(path, path + _ASIDE)
            self.refuses = True
            if self._look_at >= self._complain_at:
                self._complain_at = self._look_at + COMPLAIN_S
                TRANSPORT.error("%s", descriptors.exhausted(f"{path} accepts no connections for now"))

    def close(self, *, linger_s: float = 0.0) -> None:
        super().close(linger_s=linger_s)
        if self.refuses and not self._foreign:
            with suppress(OSError):
                os.unlink(self.address.removeprefix("ipc://") + _ASIDE)

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        self._check_usable()
        check_frames(frames, self._options)
        try:
            self._socket.send(peer, _NOBLOCK | _SNDMORE)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        self._send(frames)
        return True


class ZeroMQConnection(_SocketEndpoint):
    """`Connection` over a connected DEALER socket."""

    def __init__(self, address: str, identity: bytes | None, options: TransportOptions) -> None:
        # With a fixed identity, the listener recognises the peer after a reconnect.
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

    def _configure_tcp(self) -> None:
        super()._configure_tcp()
        keys = self._options.keys
        if isinstance(keys, ClientKeys):
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        elif keys is not None:
            raise OptionError("a connection needs ClientKeys (ConnectionFile.client_keys()), not ServerKeys")

    def receive(self, timeout_s: float | None) -> list[memoryview] | None:
        return self._receive(timeout_s)

    def send(self, frames: Sequence[Frame]) -> None:
        self._check_usable()
        check_frames(frames, self._options)
        try:
            self._send(frames)
        except zmq.Again:
            if not self._socket.poll(math.ceil(self._options.send_timeout_s * 1000), zmq.POLLOUT):
                raise PeerLostError(
                    f"{self.address} took nothing for {self._options.send_timeout_s} s and "
                    f"{self._options.queue_messages} messages wait; is it alive, and is our key accepted there?"
                ) from None
            self._send(frames)


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
