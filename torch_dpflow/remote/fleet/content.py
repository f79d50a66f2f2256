"""Content that a shard sends to its remote workers, and the log of missing workers."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.remote_worker import PIECE_BYTES
from torch_dpflow.log import LOADER, SERVICE
from torch_dpflow.remote.shipping.compatibility import missing_text, unfit, versions_here, warnings_of


@dataclass(frozen=True)
class WorkerKind:
    """Kind of a fleet's workers: they load batches or samples."""

    #: As in `LaunchSpec`.
    role: Literal["worker", "sample-worker"]
    #: How many tasks one worker holds: the minimum, and the maximum, which long round trips need.
    min_window: int
    max_window: int
    log: logging.Logger


#: One batch is loaded and one waits.
BATCH_WORKERS = WorkerKind("worker", 2, 8, LOADER)
#: The minimum is that of workers on the shard's host; the shard requests at most twice this number.
SAMPLE_WORKERS = WorkerKind("sample-worker", 16, 32, SERVICE)


class RemoteContent:
    """Content that is sent to each worker.

    Args:
        data: the pickled load spec or sample assignment.
        code: archive of the user's modules that `data` needs, see `code_bundle`; empty: no modules.
    """

    def __init__(self, data: bytes | memoryview, code: bytes | memoryview = b"") -> None:
        self.digest, self.nbytes = hashlib.sha256(data).hexdigest(), len(data)
        self.code_digest, self.code_nbytes = hashlib.sha256(code).hexdigest() if len(code) else "", len(code)
        self._contents = {self.digest: memoryview(data), self.code_digest: memoryview(code)}
        self._versions = versions_here()
        self._warned: set[str] = set()

    def piece(self, digest: str, offset: int) -> memoryview:
        """Return the piece of the content `digest` at this offset. Raises MessageError if there is no such piece."""
        data = self._contents.get(digest)
        if data is None or not 0 <= offset < data.nbytes or offset % PIECE_BYTES:
            raise MessageError("it requests a piece of an unknown content")
        return data[offset : offset + PIECE_BYTES]

    def unfit(self, versions: Mapping[str, str]) -> str:
        """Return why a worker with these versions cannot load the content, and what to do; empty if it can.

        Differences that may only change samples are logged once.
        """
        reason = unfit(versions, self._versions)
        for text in () if reason else warnings_of(versions, self._versions):
            if text not in self._warned:
                self._warned.add(text)
                LOADER.warning("%s", text)
        return reason

    def missing(self, modules: Sequence[str]) -> str:
        """Return why a worker without these modules cannot load the content, and what to do."""
        return missing_text(name for name in modules if name.replace(".", "").isidentifier())


#: After how long to log how many workers have connected, if not all have, in seconds.
COMPLAIN_S = 20.0


@dataclass
class Shortage:
    """Log of missing workers and the platform's reason. Times are in seconds."""

    #: The platform's name, how many workers there should be, and how many must have connected after `start_s`.
    platform: str
    workers: int
    least: int
    start_s: float
    #: Where workers connect, and where to log.
    address: str
    log: logging.Logger
    #: What limits the number of workers, with details, for display; empty: unknown.
    reason: str = ""
    #: When to log that not all have connected, and when too few are an error.
    complains_at: float = math.inf
    fails_at: float = math.inf

    def begin(self, now: float) -> None:
        """Start the deadlines by which workers must connect: the workers were requested at `now`."""
        self.complains_at, self.fails_at = now + COMPLAIN_S, now + self.start_s

    def end(self) -> None:
        self.complains_at = self.fails_at = math.inf

    def limit(self, by: str, text: str, working: int) -> None:
        """Record and log why only `working` workers run. by: the limit in one word; empty: none. text: its details."""
        self.reason = f"limited by {by}: {text}" if by else ""
        if by:
            self.log.warning(
                "%d of %d workers run on platform %r, %s", working, self.workers, self.platform, self.reason
            )

    def check(self, working: int, called: int, importing: str, now: float) -> str:
        """Log once how many workers are missing; return an error text if too few have connected in time, else "".

        working, called: number of workers that load, and that have connected. importing: see `RemoteWorkers`.
        """
        if working == self.workers:
            self.complains_at = self.fails_at = math.inf
        if now >= self.complains_at:
            self.complains_at = math.inf
            self._complain(working, called, importing)
        if now < self.fails_at:
            return ""
        self.fails_at = math.inf
        if called >= self.least:
            return ""
        return (
            f"{called} of min_workers={self.least} workers of platform {self.platform!r} have connected within "
            f"{self.start_s:g} s: {self.reason or self._hint()}"
        )

    def _complain(self, working: int, called: int, importing: str) -> None:
        listener = "" if called or self.reason else f"; {self._hint()}"
        self.log.warning(
            "%d of %d workers of platform %r run %.0f s after they were requested, %d more are connected%s; those that "
            "run go on, and the others are awaited%s",
            *(working, self.workers, self.platform, COMPLAIN_S, called - working, listener, importing),
        )

    def _hint(self) -> str:
        return f"is {self.address} open to where they run?"
