"""Contents of flows (pickled datasets) as files: at the coordinator, and once on each host.

A content is identified by its digest. Its size may be hundreds of megabytes, so it is transferred in pieces, and never
held in a service's memory as a whole. A separate thread of the coordinator hashes and writes it. Workers fetch their
content directly from the coordinator.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import repeat
from torch_dpflow.cluster.messages.coordinator import (
    CONTENT_PIECE_BYTES,
    MAX_CONTENT_BYTES,
    ContentPiece,
    ContentRequest,
)
from torch_dpflow.cluster.services.service import ClusterPlace, locate
from torch_dpflow.errors import DPFlowError, MessageError, StateError, UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError
from torch_dpflow.ipc.rpc import IncomingCall
from torch_dpflow.log import SERVICE

T = TypeVar("T")

#: Maximum number of simultaneous uploads to the coordinator, and of calls that wait for the thread for files.
MAX_DRAFTS, MAX_WAITING = 64, 32
#: Timeout of the transfer of a piece (seconds).
PIECE_S = 30.0
#: Time without a piece after which a fetch fails; interval at which other processes of the host check whether the fetch
#: has ended (seconds).
FETCH_S, POLL_S = 120.0, 0.5
_DRAFT, _LOCK = ".part", ".lock"


@dataclass(slots=True)
class _Draft:
    """Incomplete content, of which some pieces have been received."""

    file: IO[bytes]
    size: int
    held: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class ContentFiles:
    """Directory of contents: one file for each, named by the content's digest. Call all methods in one thread.

    Args:
        directory: path of the directory. If it does not exist, it is created so that only its owner can access it.

    The constructor, `receive` and `read` raise StateError if the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: Digests of the complete contents. Any thread may read this.
        self.digests: set[str] = set()
        self._drafts: OrderedDict[str, _Draft] = OrderedDict()
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            for path in directory.iterdir():
                if path.name.endswith(_DRAFT):
                    path.unlink()
                else:
                    self.digests.add(path.name)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, piece: ContentPiece, data: memoryview) -> int:
        """Store the next piece. Return the number of stored bytes: the offset of the next piece, or the content's size.

        A piece at a different offset is ignored, because several clients may upload one content. Raises UsageError if
        the complete content differs from the piece's `digest` or `size`.
        """
        if piece.digest in self.digests:
            return piece.size
        try:
            draft = self._draft_for(piece)
            if piece.offset == draft.held:
                left = data
                while left:  # a full disk causes a short write first; the next one raises
                    left = left[draft.file.write(left) :]
                draft.digest.update(data)
                draft.held += data.nbytes
            if draft.held >= draft.size:
                self._finish(piece.digest, draft)
        except OSError as error:
            self._discard(piece.digest)
            raise self._broken(error) from error
        return draft.held

    def read(self, request: ContentRequest) -> tuple[int, bytes]:
        """Return (content's size in bytes, its requested piece). Raises UsageError if the content is not stored."""
        if request.digest not in self.digests:
            raise UsageError(f"no content {request.digest!r} is stored")
        try:
            with open(self._directory / request.digest, "rb") as file:
                file.seek(request.offset)
                return os.fstat(file.fileno()).st_size, file.read(CONTENT_PIECE_BYTES)
        except OSError as error:
            raise self._broken(error) from error

    def drop(self, digest: str) -> None:
        self.digests.discard(digest)
        (self._directory / digest).unlink(missing_ok=True)

    def _draft_for(self, piece: ContentPiece) -> _Draft:
        draft = self._drafts.get(piece.digest)
        if draft is not None and draft.size != piece.size:
            self._discard(piece.digest)
            draft = None
        if draft is None:
            if len(self._drafts) >= MAX_DRAFTS:
                self._discard(next(iter(self._drafts)))
            file = open(self._directory / f"{piece.digest}{_DRAFT}", "wb", buffering=0)  # noqa: SIM115
            draft = self._drafts[piece.digest] = _Draft(file, piece.size)
        self._drafts.move_to_end(piece.digest)
        return draft

    def _finish(self, digest: str, draft: _Draft) -> None:
        found = draft.digest.hexdigest()
        if draft.held != draft.size or found != digest:
            self._discard(digest)
            raise UsageError(f"the uploaded content is not {digest}: it has {draft.held} bytes of digest {found}")
        os.fsync(draft.file.fileno())
        os.replace(draft.file.name, self._directory / digest)
        self._drafts.pop(digest).file.close()
        self.digests.add(digest)

    def _discard(self, digest: str) -> None:
        draft = self._drafts.pop(digest, None)
        if draft is not None:
            draft.file.close()
            os.unlink(draft.file.name)

    def _broken(self, error: OSError) -> StateError:
        return StateError(
            f"contents of flows cannot be stored in {os.fspath(self._directory)!r}: {error.strerror or error}; free "
            "space there, or start the cluster with another TMPDIR"
        )


def check_piece(piece: ContentPiece, frames: Sequence[memoryview]) -> None:
    """Raise UsageError if the content is too large, or `frames` is not a single piece of an allowed size."""
    if piece.size > MAX_CONTENT_BYTES:
        raise UsageError(f"the content of a flow has {piece.size} bytes; {MAX_CONTENT_BYTES} are allowed")
    if len(frames) != 1 or not 1 <= frames[0].nbytes <= CONTENT_PIECE_BYTES:
        raise UsageError(f"a piece of a content is one frame of 1 to {CONTENT_PIECE_BYTES} bytes")


class Contents:
    """Contents of flows at a coordinator. A thread reads and writes the files; call all methods in one other thread.

    Raises StateError if the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._files = ContentFiles(directory)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="dpflow-contents", daemon=True).start()

    @property
    def digests(self) -> set[str]:
        """Digests of the completely uploaded contents."""
        return self._files.digests

    def run(self, call: IncomingCall, work: Callable[[ContentFiles], T], done: Callable[[T], None]) -> None:
        """Run `work` in the thread for files; then call `done` there with the result, or fail `call` with the error.

        Raises OverloadedError if too many calls are waiting for the thread.
        """
        if self._work.qsize() >= MAX_WAITING:
            raise OverloadedError("too many contents are being transferred; retry")

        def run() -> None:
            try:
                result = work(self._files)
            except Exception as error:
                call.fail(error)
            else:
                done(result)

        self._work.put(run)

    def drop(self, digest: str) -> None:
        """Remove a content, without waiting: the thread for files removes its file."""
        self._files.digests.discard(digest)
        self._work.put(partial(self._drop, digest))

    def _drop(self, digest: str) -> None:
        with suppress(OSError):
            self._files.drop(digest)

    def _run(self) -> None:
        while True:
            self._work.get()()


def open_content(place: ClusterPlace, digest: str, on_progress: Callable[[], None], *, coordinator: str) -> IO[bytes]:
    """Return the open file of a content. The first process of a host that needs it fetches it for all processes.

    The file stays on the host while a process has it open, and then until another content is fetched.

    on_progress: called repeatedly while the content is fetched.
    coordinator: id of the coordinator's process.

    Raises DPFlowError if no piece arrives for `FETCH_S` seconds, or the received content does not have the digest.
    """
    folder = Path(place.directory, "contents")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / digest
    while True:
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            with _locked(Path(f"{path}{_LOCK}"), on_progress):
                if not path.exists():  # else another process has fetched it meanwhile
                    _fetch(place, path, coordinator, on_progress)
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:  # else it was swept between opening and locking
            return file
        file.close()


@contextmanager
def _locked(path: Path, on_progress: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path` during the body, and remove it afterwards.

    on_progress: called repeatedly while another process holds the lock.
    """
    while True:
        with open(path, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_progress()
                time.sleep(POLL_S)
                continue
            if os.fstat(lock.fileno()).st_nlink:  # else its last holder has removed it
                try:
                    yield
                finally:
                    path.unlink()
                return


def _fetch(place: ClusterPlace, path: Path, coordinator: str, on_progress: Callable[[], None]) -> None:
    _sweep(path.parent)
    draft = path.with_suffix(_DRAFT)
    with open(draft, "wb") as file:
        _copy(place, path.name, coordinator, file, on_progress)
    os.replace(draft, path)


def _copy(place: ClusterPlace, digest: str, coordinator: str, file: IO[bytes], on_progress: Callable[[], None]) -> None:
    """Fetch a content piece by piece into `file`, continuing after every failure of the coordinator."""
    hashed, latest, backoff = hashlib.sha256(), time.monotonic(), Backoff()

    def copy() -> None:
        nonlocal latest
        on_progress()
        with place.connect(locate(place, coordinator, timeout_s=PIECE_S), timeout_s=PIECE_S) as client:
            size = -1
            while file.tell() != size:
                answer = client.call("content", ContentRequest(digest, file.tell()), reply_type=int)
                (piece,), size = answer.frames, answer.body
                if not piece.nbytes or file.tell() + piece.nbytes > size:
                    raise MessageError(f"a piece of {piece.nbytes} bytes at {file.tell()} of {size}")
                file.write(piece)
                hashed.update(piece)
                latest = time.monotonic()
                backoff.reset()
                on_progress()

    def check(error: DPFlowError, _: bool) -> None:
        if time.monotonic() - latest >= FETCH_S:
            raise error
        SERVICE.warning("fetching the flow's content failed, retrying (%s)", error)

    repeat(copy, check, FETCH_S, backoff)
    if hashed.hexdigest() != digest:
        raise MessageError(f"the fetched content does not have the digest {digest}")


def _sweep(folder: Path) -> None:
    """Remove contents that no process of this host has open."""
    for path in folder.iterdir():
        if not path.suffix:
            with suppress(OSError), open(path, "rb") as file:  # removed meanwhile, or in use
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
