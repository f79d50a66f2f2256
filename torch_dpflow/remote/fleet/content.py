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
    """Kind of the workers of a fleet: whether they load batches or single samples, and how many tasks each holds."""

    #: The `role` in the `LaunchSpec` of each worker.
    role: Literal["worker", "sample-worker"]
    #: Minimum and maximum number of tasks that one worker holds; a longer round trip raises the number.
    min_window: int
    max_window: int
    log: logging.Logger


#: Workers that load batches: at the minimum, one batch is loaded and one waits.
BATCH_WORKERS = WorkerKind("worker", 2, 8, LOADER)
#: Workers that load single samples.
SAMPLE_WORKERS = WorkerKind("sample-worker", 16, 32, SERVICE)


class RemoteContent:
    """Content that a shard sends to each remote worker, in pieces: what to load, and the user's modules.

    Args:
        data: the pickled `LoadSpec`, if workers load batches, or `SampleAssignment`, if they load samples.
        code: archive of the user's modules that `data` needs, see `code_bundle`; empty: no modules.
    """

    def __init__(self, data: bytes | memoryview, code: bytes | memoryview = b"") -> None:
        self.digest, self.nbytes = hashlib.sha256(data).hexdigest(), len(data)
        self.code_digest, self.code_nbytes = hashlib.sha256(code).hexdigest() if len(code) else "", len(code)
        self._contents = {self.digest: memoryview(data), self.code_digest: memoryview(code)}
        self._versions = versions_here()
        self._warned: set[str] = set()

    def piece(self, digest: str, offset: int) -> memoryview:
        """Return the piece at byte `offset` of the content with this digest. Raises MessageError if there is none."""
        data = self._contents.get(digest)
        if data is None or not 0 <= offset < data.nbytes or offset % PIECE_BYTES:
            raise MessageError("it requests a piece of an unknown content")
        return data[offset : offset + PIECE_BYTES]

    def unfit(self, versions: Mapping[str, str]) -> str:
        """Return why a worker with these `versions_here` cannot load the content, and what to do; empty if it can.

        If it can, version differences that may change samples are logged, each once.
        """
        reason = unfit(versions, self._versions)
        for text in () if reason else warnings_of(versions, self._versions):
            if text not in self._warned:
                self._warned.add(text)
                LOADER.warning("%s", text)
        return reason

    def missing(self, modules: Sequence[str]) -> str:
        """Return the error text, with advice, for a worker that reports these modules as missing."""
        return missing_text(name for name in modules if name.replace(".", "").isidentifier())


#: Time from the request for workers until missing workers are logged, in seconds.
COMPLAIN_S = 20.0


@dataclass
class Shortage:
    """Deadlines by which workers must connect, and the log of missing workers. Times are in seconds."""

    #: The platform's name, the target number of workers, and how many must be connected `start_s` after `begin`.
    platform: str
    workers: int
    least: int
    start_s: float
    #: The address to which workers connect, and the log to write to.
    address: str
    log: logging.Logger
    #: What limits the number of workers, with details, for display; empty if no limit is known.
    reason: str = ""
    #: When to log how many workers are missing, and when too few connected workers are an error.
    complains_at: float = math.inf
    fails_at: float = math.inf

    def begin(self, now: float) -> None:
        """Start the deadlines of workers that are requested at `now`."""
        self.complains_at, self.fails_at = now + COMPLAIN_S, now + self.start_s

    def end(self) -> None:
        self.complains_at = self.fails_at = math.inf

    def limit(self, by: str, text: str, working: int) -> None:
        """Set `reason`, and log it if `by` is not empty. by: what limits the number; empty: nothing. text: details."""
        self.reason = f"limited by {by}: {text}" if by else ""
        if by:
            self.log.warning(
                "%d of %d workers run on platform %r, %s", working, self.workers, self.platform, self.reason
            )

    def check(self, working: int, called: int, importing: str, now: float) -> str:
        """Log missing workers if that is due. If too few have connected in time, return an error text, once; else "".

        working: number of workers that load. called: number of connected workers. importing: see `RemoteWorkers`.
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
