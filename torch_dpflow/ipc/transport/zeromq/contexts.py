"""The zmq contexts of a process: shared use, forks, CURVE keys of peers; and a check that an ipc path is free."""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
import weakref
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from torch_dpflow._core.descriptors import require
from torch_dpflow.ipc.transport.base import ServerKeys, WorkerKeys, is_refused

#: How many descriptors a context, its two threads and its first socket have open.
DESCRIPTORS = 12
ZAP_DOMAIN = b"dpflow"
#: Bytes of a key in binary form.
_KEY_BYTES = 32
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
#: Just below the size above which glibc always returns freed memory to the kernel at once (32 MiB), bytes.
_MAX_KEPT_BYTES = 31 * 1024 * 1024


class SharedContext:
    """Shared zmq context with a count of its users; the last user ends it.

    Thread-safe; a forked child has no context.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a socket, which releases the context, while the lock is held.
        self._lock = threading.RLock()
        self._context: zmq.SyncContext | None = None
        self._users = 0

    def take(self) -> zmq.SyncContext:
        """Count one more user, which later calls `give_back`; return the context. Raises DescriptorLimitError."""
        with self._lock:
            self._users += 1  # first: a socket that is collected meanwhile must not end the context
            try:
                if self._context is None:
                    self._context = _new_context()
            except BaseException:
                self._users -= 1
                raise
            return self._context

    def give_back(self) -> None:
        """Release the context. The user must have closed its socket."""
        with self._lock:
            self._users -= 1
            if self._users or self._context is None:
                return
            context, self._context = self._context, None
        context.term()

    def leave_behind(self) -> zmq.SyncContext | None:
        """Detach the parent's context in a forked child, and return it, or None."""
        context, self._context = self._context, None
        self._lock = threading.RLock()
        self._users = 0
        return context


shared = SharedContext()
#: Objects with sockets, whose `disown` is called in every forked child; it returns what must never be collected.
inheritable: weakref.WeakSet[Any] = weakref.WeakSet()
#: pyzmq objects of the parent, which a forked child keeps forever: collecting one would call into libzmq.
_inherited: list[object] = []


def guarded_context(keys: ServerKeys | WorkerKeys) -> zmq.SyncContext:
    """Create a context whose listener accepts these keys only.

    libzmq authenticates a peer before it passes on any message. It has one authenticator per context, so each listener
    with keys has a separate context.
    """
    context = _new_context()
    authenticator = context.socket(zmq.REP)
    authenticator.bind(_ZAP_ADDRESS)
    threading.Thread(target=_authenticate, args=(authenticator, keys.user_of), name="dpflow-zap", daemon=True).start()
    return context


def _new_context() -> zmq.SyncContext:
    # libzmq aborts the process where it gets no descriptors for its threads.
    require(DESCRIPTORS, "a connection")
    keep_freed_memory()
    return zmq.Context(io_threads=1)


def draw_key_pair() -> tuple[bytes, bytes]:
    """Generate a CURVE key pair: (public, secret), Z85 text."""
    return zmq.curve_keypair()


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc reuse freed frames instead of returning their pages to the kernel.

    glibc raises its thresholds for the whole process when a large buffer is freed. The pages of the buffer freed here
    are never touched. Otherwise receiving 2.5 MB costs 600 page faults, which double the time. Only the first call
    frees a buffer, and a forked child inherits the thresholds: a second buffer would come from used memory and be
    cleared, which takes 20 ms.
    """
    bytes(_MAX_KEPT_BYTES)


def _authenticate(socket: zmq.SyncSocket, user_of: Callable[[bytes], str | None]) -> None:
    """Answer ZAP requests, in which libzmq asks whether to accept a peer's CURVE key, until the context ends."""
    with socket:
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *keys = socket.recv_multipart()
                key = b"".join(keys)
                known = mechanism == b"CURVE" and len(key) == _KEY_BYTES
                user = user_of(z85.encode(key)) if known else None
                code, text = (b"400", b"unknown client key") if user is None else (b"200", b"OK")
                socket.send_multipart([version, request, code, text, (user or "").encode(), b""])
            except zmq.ContextTerminated:
                return


def _after_fork_in_child() -> None:
    _inherited.append(shared.leave_behind())
    for one in list(inheritable):
        _inherited.extend(one.disown())


os.register_at_fork(after_in_child=_after_fork_in_child)


def check_path(path: str, *, take_leftover: bool) -> None:
    """Raise OSError if there is a file at `path` that a new listener must not replace; libzmq replaces any silently.

    A socket without a listener was left by a killed process, or a closing process is about to remove it.

    take_leftover: whether such a socket may be replaced; a socket with a listener, or another file, never is.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file is there that is no socket")
    if not (take_leftover and is_refused(f"ipc://{path}")):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
