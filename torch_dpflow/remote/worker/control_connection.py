"""Control connection of a remote worker: registration, download of its content, heartbeats.

The connection has a separate thread, because the worker's main thread runs the user's code, for any length of time.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch_dpflow._core.clocks import HEARTBEAT_S
from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow.errors import MessageError, PeerLostError
from torch_dpflow.ipc.messages.fields import MAX_TEXT, WorkerRefusedError
from torch_dpflow.ipc.messages.headers import PROTOCOL_VERSION, WorkerRefused, decode, encode
from torch_dpflow.ipc.messages.remote_worker import (
    MAX_NAMES,
    PIECE_BYTES,
    FetchPiece,
    LaunchSpec,
    Piece,
    RemoteHandshake,
    RemoteWelcome,
    WorkerGoodbye,
    WorkerHeartbeat,
)
from torch_dpflow.ipc.transport import Connection, Frame, TransportOptions, connect
from torch_dpflow.ipc.transport.base import ClientKeys
from torch_dpflow.ipc.transport.link_time import LinkTime
from torch_dpflow.workers.exit_report import importing
from torch_dpflow.workers.process_control import KillTimer

#: Maximum pieces of a content that are requested at once, and after how long they are requested again, in seconds.
CREDIT, AGAIN_S = 4, 5.0
#: How long to try one of several addresses, and how long the last messages may take to leave, in seconds.
ADDRESS_S, GOODBYE_S = 5.0, 2.0
#: How much longer than `silence_s` a worker can last if this thread cannot end it, in seconds.
STUCK_S = 5.0
#: Maximum time for which an import waits for the heartbeat that names it, in seconds.
ANNOUNCE_S = 1.0


class _Download:
    """Content that arrives in pieces."""

    def __init__(self, digest: str, nbytes: int) -> None:
        self.digest = digest
        self.data = bytearray(nbytes)
        self.missing = set(range(0, nbytes, PIECE_BYTES))
        self.requested: dict[int, float] = {}

    def take(self, piece: Piece, frame: memoryview) -> None:
        if piece.digest != self.digest or piece.offset not in self.missing:
            return
        expected = min(PIECE_BYTES, len(self.data) - piece.offset)
        if frame.nbytes != expected:
            raise MessageError(f"a piece of {frame.nbytes} bytes; {expected} belong there")
        self.data[piece.offset : piece.offset + expected] = frame
        self.missing.discard(piece.offset)
        self.requested.pop(piece.offset, None)

    def due(self, now: float) -> list[int]:
        """Return the offsets of the pieces to request now."""
        late = [offset for offset, at in self.requested.items() if now - at >= AGAIN_S]
        fresh = sorted(self.missing - self.requested.keys())[: max(0, CREDIT - len(self.requested))]
        self.requested.update(dict.fromkeys([*late, *fresh], now))
        return [*late, *fresh]


class ControlConnection(threading.Thread):
    """Thread that connects to the shard and sends heartbeats.

    Once the content has arrived, it ends the process if the shard rejects the worker or no longer answers, or when the
    worker's lifetime ends. If the user's code never lets this thread run, the kernel ends the process `STUCK_S` seconds
    after it should have ended because the shard did not answer.

    Args:
        launch_spec: the worker's launch spec, with addresses and keys.
        versions: from `versions_here`.
    """

    def __init__(self, launch_spec: LaunchSpec, versions: dict[str, str]) -> None:
        super().__init__(name="dpflow-control", daemon=True)
        self._launch_spec = launch_spec
        self._versions = versions
        self._identity = f"{launch_spec.number}/{launch_spec.incarnation}/{secrets.token_hex(8)}"
        self._options = TransportOptions(
            keys=ClientKeys(
                public=launch_spec.public.encode(),
                secret=launch_spec.secret.encode(),
                server_public=launch_spec.server_public.encode(),
            )
        )
        self._connection: Connection | None = None
        #: The address at which the shard has answered.
        self.address = ""
        #: What the main thread waits for: contents by digest, or an error.
        self._results: queue.SimpleQueue[tuple[RemoteWelcome, dict[str, bytes]] | Exception] = queue.SimpleQueue()
        #: Whether the main thread waits for that, and so raises an error.
        self._is_awaited = True
        self._begun = self._last_seen = self._sent_at = self._requested = time.monotonic()
        self._kill_timer = KillTimer()
        self._welcome: RemoteWelcome | None = None
        self._downloads: list[_Download] = []
        self._announced = threading.Event()
        self._announced.set()
        self._report: str | None = None
        self._missing: list[str] = []
        #: Directory that this thread removes if it ends the process; None: none.
        self.directory: PrivateDirectory | None = None
        #: Round trips of the latest heartbeats: the shortest counts, since threads of two processes may be late.
        self._round_trips_s: deque[float] = deque([0.0], maxlen=8)
        #: The other connection; it counts its messages.
        self._work: CountedConnection | None = None

    # -- for the main thread -----------------------------------------------------------------------------

    def contents(self) -> tuple[RemoteWelcome, dict[str, bytes]]:
        """Wait until the contents to load have arrived; return (the shard's welcome, contents by digest).

        Raises:
            WorkerRefusedError: the shard rejects this worker.
            PeerLostError: no shard has answered the handshake in time.
            MessageError: a content does not have its digest, or a message is malformed.
        """
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        for digest, data in result[1].items():
            if hashlib.sha256(data).hexdigest() != digest:
                raise MessageError(f"the received data does not have the digest {digest}: it was changed on its way")
        return result

    def connect(self) -> CountedConnection:
        """Open the worker's second connection, for tasks and results."""
        inner = connect(self.address, identity=f"{self._identity}/work".encode(), options=self._options)
        self._work = CountedConnection(inner, LinkTime.of(self.address))
        return self._work

    def announce(self) -> None:
        """Send a heartbeat with the name of a module whose import begins; wait up to `ANNOUNCE_S` until it is sent."""
        # Not for an import in this thread, which sends the heartbeat.
        if self._connection is not None and self.is_alive() and threading.current_thread() is not self:
            self._announced.clear()
            self._connection.wake()
            self._announced.wait(ANNOUNCE_S)

    def goodbye(self, report: str, missing: Sequence[str] = ()) -> None:
        """Report to the shard that this worker ends, and why. missing: modules that the worker lacks."""
        self._missing = [module[:128] for module in missing[:MAX_NAMES]]
        self._report = report
        if self._connection is not None and self.is_alive():
            self._connection.wake()
            self.join(2 * GOODBYE_S)

    # -- its thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Connect, then send heartbeats until `goodbye`. The thread's main function."""
        try:
            self._call()
            self._stay()
        except Exception as error:
            if not self._is_awaited:
                self._leave_at_once(f"{type(error).__name__}: {error}")
            self._results.put(error)
        finally:
            if self._connection is not None:
                self._connection.close(linger_s=GOODBYE_S)

    def _call(self) -> None:
        """Send a handshake to each address in turn, until one answers."""
        addresses, timeout_s = self._launch_spec.addresses, self._launch_spec.silence_s
        for address in itertools.cycle(addresses):
            connection = connect(address, identity=f"{self._identity}/line".encode(), options=self._options)
            self._connection, self.address = connection, address
            until = time.monotonic() + (ADDRESS_S if len(addresses) > 1 else timeout_s)
            if self._greet(connection, until):
                return
            self._connection = None
            connection.close()
            if time.monotonic() - self._begun >= timeout_s:
                raise PeerLostError(
                    f"no answer for {self._launch_spec.name} at {', '.join(addresses)}: is that address reachable from "
                    "here, and is the launch spec's key still accepted?"
                )

    def _greet(self, connection: Connection, until: float) -> bool:
        while time.monotonic() < until:
            self._send(connection, encode(RemoteHandshake(PROTOCOL_VERSION, self._versions, _where())))
            self._receive(connection, HEARTBEAT_S)
            if self._welcome is not None:
                return True
        return False

    def _stay(self) -> None:
        connection = self._connection
        assert connection is not None
        while self._report is None:
            now = time.monotonic()
            if now - self._last_seen >= self._launch_spec.silence_s:
                self._leave_at_once(f"no message of the shard for {self._launch_spec.silence_s:g} s")
            if self._launch_spec.lifetime_s is not None and now - self._begun >= self._launch_spec.lifetime_s:
                self._leave_at_once("its lifetime has ended")
            for download in self._downloads:
                for offset in download.due(now):
                    self._send(connection, encode(FetchPiece(download.digest, offset)))
            if not self._announced.is_set():
                self._send(connection, encode(self._heartbeat()))
                self._announced.set()
            elif now - self._sent_at >= HEARTBEAT_S:
                self._requested = now
                self._send(connection, encode(self._heartbeat()))
            self._receive(connection, max(0.0, self._sent_at + HEARTBEAT_S - now))
        self._send(connection, encode(WorkerGoodbye(self._report[-MAX_TEXT:], self._sent, self._missing)))

    def _heartbeat(self) -> WorkerHeartbeat:
        work = self._work
        if work is None:
            return WorkerHeartbeat(0, 0, min(self._round_trips_s), importing=importing()[:MAX_TEXT])
        # In this order: a message that the main thread receives meanwhile counts as missing, until the next heartbeat.
        received = work.received if work.waits else None
        return WorkerHeartbeat(work.sent, received, min(self._round_trips_s), work.away_s(), importing()[:MAX_TEXT])

    @property
    def _sent(self) -> int:
        return 0 if self._work is None else self._work.sent

    def _send(self, connection: Connection, frame: Frame) -> None:
        self._sent_at = time.monotonic()
        connection.send([frame])

    def _receive(self, connection: Connection, timeout_s: float) -> None:
        """Handle the messages that arrive within `timeout_s` seconds."""
        frames = connection.receive(timeout_s)
        while frames is not None:
            self._last_seen = time.monotonic()
            self._kill_timer.set(self._launch_spec.silence_s + STUCK_S)
            header: Any = decode(frames[0])
            match header:
                case RemoteWelcome() if self._welcome is None:
                    self._on_welcome(header)
                case Piece():
                    self._on_piece(header, frames[1])
                case WorkerHeartbeat():
                    self._on_heartbeat()
                case WorkerRefused(reason=reason):
                    self._on_refused(reason)
            frames = connection.receive(0)

    def _on_welcome(self, welcome: RemoteWelcome) -> None:
        self._welcome = welcome
        wanted = ((welcome.content, welcome.nbytes), (welcome.code, welcome.code_nbytes))
        self._downloads = [_Download(digest, nbytes) for digest, nbytes in wanted if digest]

    def _on_piece(self, piece: Piece, frame: memoryview) -> None:
        for download in self._downloads:
            download.take(piece, frame)
        if self._downloads and not any(download.missing for download in self._downloads):
            assert self._welcome is not None
            contents = {download.digest: bytes(download.data) for download in self._downloads}
            self._downloads = []
            self._is_awaited = False
            self._results.put((self._welcome, contents))

    def _on_heartbeat(self) -> None:
        if not self._round_trips_s[-1]:
            self._round_trips_s.clear()
        self._round_trips_s.append(time.monotonic() - self._requested)

    def _on_refused(self, reason: str) -> None:
        if self._is_awaited:
            raise WorkerRefusedError(reason)
        self._leave_at_once(reason and f"the shard refuses it: {reason}", code=0)

    def _leave_at_once(self, why: str, code: int = 1) -> None:
        # The main thread may be in the user's code, for any time.
        if why:
            print(f"{self._launch_spec.name} ends: {why}", file=sys.stderr, flush=True)
        if self.directory is not None:
            self.directory.remove()
        os._exit(code)


def _where() -> str:
    return f"{socket.gethostname()[:100]}, pid {os.getpid()}"


class CountedConnection:
    """Connection for tasks and results that counts its messages, so that the shard notices lost ones.

    link: measures how long data is in transit.
    """

    def __init__(self, inner: Connection, link: LinkTime) -> None:
        self._inner, self._link = inner, link
        self.identity = inner.identity
        self.sent = self.received = 0
        #: Whether the main thread waits for a message, and so has received all that arrived; since when it waits; and
        #: how long it has waited before, in seconds.
        self.waits = False
        self._since = self._waited_s = 0.0
        #: How long there was nothing to do while results were under way; at the latest look, and idle time.
        self._away_s = self._idle_s = 0.0
        self._looked_at = time.monotonic()
        self.wake: Callable[[], None] = inner.wake

    def close(self, *, linger_s: float = GOODBYE_S) -> None:
        """Close like `Connection.close`, but by default wait up to `GOODBYE_S` until all messages are sent."""
        self._inner.close(linger_s=linger_s)

    def away_s(self) -> float:
        """Return a lower limit of the total time for which a slow network kept the main thread idle, in seconds.

        Only one thread may call this; it can be any thread.
        """
        waited_s, since, now = self._waited_s, self._since, time.monotonic()
        # It may be a little less than before, as the main thread runs meanwhile.
        idle_s = max(self._idle_s, waited_s + (now - since if since else 0.0))
        passed_s = now - self._looked_at
        both_s = min(passed_s, self._link.passed_s()) + idle_s - self._idle_s - passed_s
        self._away_s += max(0.0, both_s)
        self._idle_s, self._looked_at = idle_s, now
        return self._away_s

    def send(self, frames: Any) -> None:
        self._inner.send(frames)
        self.sent += 1

    def receive(self, timeout_s: float | None) -> list[memoryview] | None:
        if timeout_s is not None:
            frames = self._inner.receive(timeout_s)
            self.received += frames is not None
            return frames
        self._since, self.waits = time.monotonic(), True
        frames = self._inner.receive(None)
        self.received += frames is not None
        since, self.waits, self._since = self._since, False, 0.0
        self._waited_s += time.monotonic() - since
        return frames
