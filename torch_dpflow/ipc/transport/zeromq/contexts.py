"""The zmq contexts of a process: one that sockets share, and one for each listener with keys. Handling of forks."""

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
    """zmq context that sockets of a process share; the last user ends it. Thread-safe; a forked child has none."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a socket, which releases the context, while the lock is held.
        self._lock = threading.RLock()
        self._context: zmq.SyncContext | None = None
        self._users = 0

    def take(self) -> zmq.SyncContext:
        """Return the context; call `give_back` later. Raises DescriptorLimitError if too few descriptors are left."""
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
        """Detach the parent's context in a forked child, and return it; None if the parent had none."""
        context, self._context = self._context, None
        self._lock = threading.RLock()
        self._users = 0
        return context


shared = SharedContext()
#: Objects with sockets. `disown` of each is called in every forked child, and returns objects that must stay alive.
inheritable: weakref.WeakSet[Any] = weakref.WeakSet()
#: pyzmq objects of the parent, which a forked child keeps forever: collecting one would call into libzmq.
_inherited: list[object] = []


def guarded_context(keys: ServerKeys | WorkerKeys) -> zmq.SyncContext:
    """Create a context for a listener, which then accepts only peers for whose keys `keys.user_of` returns a user.

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
    """Make glibc keep the memory of freed frames for this process instead of returning its pages to the kernel.

    Otherwise each 2.5 MB that are received cost 600 page faults. Only the first call in a process has an effect, which
    a forked child inherits.
    """
    # glibc raises its thresholds when a large buffer is freed. A second buffer would be cleared, which takes 20 ms.
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
    """Raise OSError if there is a file at `path` that a new listener must not replace; libzmq replaces any file.

    take_leftover: allow a socket without a listener, which a killed process has left, or a closing process is about to
        remove. A socket with a listener, and any file that is not a socket, are always refused.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file is there that is no socket")
    if not (take_leftover and is_refused(f"ipc://{path}")):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
