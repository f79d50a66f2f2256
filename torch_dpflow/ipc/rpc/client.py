"""RPC client: calls over one connection, from any thread. The client starts no thread.

One of the waiting threads, the leader, reads the socket for all of them. When its own answer has arrived, another
thread becomes the leader. So a single caller needs no switch between threads, which would cost more than all else in a
small call.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from torch_dpflow._core.checks import check_fields, check_int, check_seconds, is_loopback
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import PeerLostError, StateError
from torch_dpflow.ipc.messages.headers import encode_body
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.client_session import Answer, Call, ClientSession, ClientStats
from torch_dpflow.ipc.transport import Frame, TransportOptions, check_frames, connect


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Timeouts and limits of a client. Raises OptionError or OptionTypeError for a value that is not allowed."""

    #: How long a call waits for its answer by default, seconds.
    timeout_s: float = 60.0
    #: After this time without an answer, and again at this interval, the client inquires about the call, seconds.
    inquire_s: float = 0.5
    #: Maximum shared memory lent to a server at an ipc address, bytes; 0 sends everything through the socket.
    shared_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        check_fields(self, check_seconds, "timeout_s", "inquire_s")
        check_fields(self, check_int, "shared_bytes", minimum=0)


class PendingCall:
    """Call that was sent; any thread may wait for its `result`."""

    def __init__(self, client: RpcClient, call: Call) -> None:
        self._client = client
        self._call = call

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether `result` would now return or raise without waiting.

        Raises PeerLostError if the client was closed, or its connection accepts no more messages.
        """
        if self._call.is_over:
            return True
        with self._client._usable:
            return self._client._is_over_within(self._call, timeout_s)

    def result(self) -> Answer:
        """Wait for the answer, until the call's deadline, and return it.

        Raises:
            RemoteCallError: the server answered with an error.
            DeadlineError: the server did not answer in time.
            PeerLostError: the client was closed, or its connection accepts no more messages.
            MessageError: the answer is malformed or not of `reply_type`, or the server has another protocol version.
            DescriptorLimitError: this process has too many files open to map the answer's shared memory.
        """
        if self._call.is_over:
            return self._call.outcome()
        with self._client._usable:
            return self._client._result(self._call)


class RpcClient:
    """Client of one server. Thread-safe; unusable in a forked child.

    A call is repeated until it is answered or its deadline passes, across reconnects and restarts of the server, which
    may execute it more than once. The frames of a call must not change before it is answered.

    Args:
        address: where the server listens, now or later.
        transport: limits, and the keys for tcp between hosts.
    """

    def __init__(
        self,
        address: str,
        *,
        options: ClientOptions | None = None,
        transport: TransportOptions | None = None,
    ) -> None:
        self.address = address
        self.options = options or ClientOptions()
        self._pid = os.getpid()
        transport = transport or TransportOptions()
        self._connection = connect(address, options=transport)
        #: Guards everything below, and the connection while no thread leads.
        self._changed = threading.Condition(threading.Lock())
        #: Whether a thread leads. It owns the connection then, without holding the lock.
        self._leading = False
        self._closed = False
        #: How many threads wait for answers.
        self._waiters = 0
        # Not a bound method: a reference cycle would leave a client that was not closed to the garbage collector, which
        # would close its socket in an arbitrary thread.
        self._session = ClientSession(
            address,
            functools.partial(_make_carrier, address, self.options),
            functools.partial(check_frames, options=transport),
        )
        self._inquire_at = time.monotonic()

    def call(
        self,
        method: str,
        body: Any = None,
        frames: Sequence[Frame] = (),
        *,
        reply_type: Any = Any,
        timeout_s: float | None = None,
    ) -> Answer:
        """Call `method` and wait for its answer. For arguments and errors see `begin` and `PendingCall.result`."""
        with self._usable:
            return self._result(self._begin(method, body, frames, reply_type, timeout_s))

    def begin(
        self,
        method: str,
        body: Any = None,
        frames: Sequence[Frame] = (),
        *,
        reply_type: Any = Any,
        timeout_s: float | None = None,
    ) -> PendingCall:
        """Send a call without waiting for its answer.

        body: small arguments; anything that msgpack can encode.
        frames: bulk data.
        reply_type: the type that the answer's body must have.
        timeout_s: how long the call may take, seconds; None: the client's default.

        Raises MessageError if the call exceeds a limit, PeerLostError if the client was closed or its queue is full.
        """
        with self._usable:
            call = self._begin(method, body, frames, reply_type, timeout_s)
            self._flush()
        return PendingCall(self, call)

    def stats(self) -> ClientStats:
        with self._changed:
            return replace(self._session.stats)

    def close(self) -> None:
        """Fail the open calls and disconnect. May be called twice."""
        if os.getpid() != self._pid:
            self._connection.close()
            return
        with self._changed:
            self._closed = True
            self._session.fail_all(PeerLostError(f"the client of {self.address} was closed"))
            if self._leading:
                self._connection.wake()
                self._changed.wait_for(lambda: not self._leading)
            self._connection.close()
            self._session.close()

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- with the lock held, except around the socket ---

    @property
    def _usable(self) -> threading.Condition:
        if os.getpid() != self._pid:
            raise StateError(f"the client of {self.address} was made before a fork; make one in the child")
        if self._closed:
            raise PeerLostError(f"the client of {self.address} was closed")
        return self._changed

    def _begin(self, method: str, body: Any, frames: Sequence[Frame], reply_type: Any, timeout_s: float | None) -> Call:
        timeout_s = self.options.timeout_s if timeout_s is None else timeout_s
        return self._session.begin_call(
            method, encode_body(body), frames, msgpack_decoder(reply_type), now=time.monotonic(), timeout_s=timeout_s
        )

    def _result(self, call: Call) -> Answer:
        if not self._wait(call, call.deadline):
            self._session.abandon(call, self._session.late(call))
        return call.outcome()

    def _is_over_within(self, call: Call, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether the call has ended or its deadline has passed."""
        until = time.monotonic() + timeout_s
        return self._wait(call, min(until, call.deadline)) or until >= call.deadline

    def _wait(self, call: Call, deadline: float) -> bool:
        """Wait until the call has ended; return False if the deadline passes first.

        The calling thread becomes the leader if there is none.
        """
        if not self._waiters:
            self._inquire_at = max(self._inquire_at, time.monotonic() + self.options.inquire_s)
        self._waiters += 1
        try:
            return self._wait_on(call, deadline)
        finally:
            self._waiters -= 1
            if self._session.outbox and not (self._leading or self._waiters or self._closed):
                self._lead(None)  # a call that another thread began after this one had sent the others

    def _wait_on(self, call: Call, deadline: float) -> bool:
        while not call.is_over:
            now = time.monotonic()
            if now >= deadline:
                return False
            if self._leading:
                if self._session.outbox:
                    self._connection.wake()
                self._changed.wait(deadline - now)
            else:
                if now >= self._inquire_at:
                    self._inquire_at = now + self.options.inquire_s
                    self._session.inquire(now, self.options.inquire_s)
                self._lead(max(0.0, min(deadline, self._inquire_at) - now))
        return True

    def _flush(self) -> None:
        """Send the outbox, or make the leader send it, without waiting for answers."""
        if self._leading:
            self._connection.wake()
        else:
            self._lead(None)

    def _lead(self, wait_s: float | None) -> None:
        """Send the outbox; then wait up to `wait_s` seconds for a message and handle it. None: do not read."""
        outbox, self._session.outbox = self._session.outbox, []
        received = None
        self._leading = True
        self._changed.release()
        outbox.reverse()
        try:
            while outbox:
                self._connection.send(outbox[-1])
                outbox.pop()
            if wait_s is not None:
                received = self._connection.receive(wait_s)
        finally:
            self._changed.acquire()
            self._session.outbox[:0] = outbox[::-1]  # what the connection did not take
            self._leading = False
            self._changed.notify_all()
        if received is not None:
            self._session.on_message(received, time.monotonic())


def _make_carrier(address: str, options: ClientOptions) -> Carrier:
    return Carrier(
        shared_bytes=options.shared_bytes if address.startswith("ipc://") else 0,
        compress=address.startswith("tcp://") and not is_loopback(address),
    )
