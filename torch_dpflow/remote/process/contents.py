"""The contents of flows, what their workers load, as files: at the coordinator, and once on each host.

They may have hundreds of megabytes. So they travel in pieces, are known by their digest, and no service holds one in
memory or waits until it is hashed or written: the coordinator has a thread for that, and workers fetch by themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch_dpflow.errors import DPFlowError, MessageError, StateError, UsageError
from torch_dpflow.remote.process.locate import locate
from torch_dpflow.remote.process.spec import SERVICE, ClusterPlace
from torch_dpflow.remote.wire.coordinator import CONTENT_PIECE_BYTES, ContentPiece, ContentRequest

#: Most contents that are on their way to the coordinator at the same time, and most calls that wait for its thread.
MAX_DRAFTS, MAX_WAITING = 64, 32
#: How long the coordinator may take to answer for a piece, and the pause after it has not, seconds.
PIECE_S, RETRY_S = 30.0, 1.0
#: How long whoever fetches does without a piece until it gives up, and how often who waits for it looks, seconds.
FETCH_S, LOOK_S = 120.0, 0.5
_DRAFT, _LOCK = ".part", ".lock"


@dataclass(slots=True)
class _Draft:
    """A content of which the first pieces are there."""

    file: IO[bytes]
    size: int
    held: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class ContentFiles:
    """Contents in a directory, one file each, which has the digest's name. One thread writes and reads.

    Args:
        directory: made where it is not there; only its owner may enter.

    Raises StateError, also from its methods, where the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: Those that are there as a whole. Any thread may ask.
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
        """Take in a piece; how many bytes are there now, from where the next one is to go on. All of them: it is whole.

        A piece that does not go on where the last one ended is left out: several may bring one content.
        Raises UsageError where the whole has another digest.
        """
        if piece.digest in self.digests:
            return piece.size
        try:
            draft = self._draft_for(piece)
            if piece.offset == draft.held:
                left = data
                while left:  # a write is a short one where a disk fills up; the next one says so
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
        """How long a content is, bytes, and a piece of it."""
        try:
            with open(self._directory / request.digest, "rb") as file:
                file.seek(request.offset)
                return os.fstat(file.fileno()).st_size, file.read(CONTENT_PIECE_BYTES)
        except OSError as error:
            raise self._broken(error) from error

    def drop(self, digest: str) -> None:
        """Remove a content, if it is there."""
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
            raise UsageError(
                f"what came is not the content {digest}, but {draft.held} bytes of digest {found}"
            )
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
            f"what flows load cannot be kept in {os.fspath(self._directory)!r}: {error.strerror or error}; make room "
            "there, or start the cluster with another --state"
        )


class Contents:
    """A coordinator's contents, kept by a thread of its own. The rest is for the coordinator's thread.

    Raises StateError where the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._files = ContentFiles(directory)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="dpflow-contents", daemon=True).start()

    @property
    def digests(self) -> set[str]:
        """What is there."""
        return self._files.digests

    @property
    def is_busy(self) -> bool:
        """Whether so much waits for the thread that callers should come again."""
        return self._work.qsize() >= MAX_WAITING

    def receive(self, piece: ContentPiece, data: memoryview, done: Callable[[int | Exception], None]) -> None:
        """As `ContentFiles.receive`; `done` is called in the contents' thread, with the result or the error."""
        self._begin(lambda: self._files.receive(piece, data), done)

    def read(self, request: ContentRequest, done: Callable[[tuple[int, bytes] | Exception], None]) -> None:
        """As `ContentFiles.read`, likewise."""
        self._begin(lambda: self._files.read(request), done)

    def drop(self, digest: str) -> None:
        """As `ContentFiles.drop`; it is not waited for."""
        self._files.digests.discard(digest)
        self._begin(lambda: self._files.drop(digest), lambda _: None)

    def _begin(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        def run() -> None:
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

        self._work.put(run)

    def _run(self) -> None:
        while True:
            self._work.get()()


def open_content(
    place: ClusterPlace, digest: str, going_on: Callable[[], None], *, coordinator: str
) -> IO[bytes]:
    """A content, to be read: fetched from the coordinator by the first process of this host that asks, for all of them.

    It stays on the host for as long as any of them has it open, and after that until another one is fetched.

    going_on: called again and again meanwhile.
    coordinator: the id of its process.
    Raises DPFlowError where it cannot be fetched for `FETCH_S`, or is another.
    """
    folder = Path(place.directory, "contents")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / digest
    while True:
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            with _locked(Path(f"{path}{_LOCK}"), going_on):  # another process may have fetched it meanwhile
                if not path.exists():
                    _fetch(place, path, coordinator, going_on)
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:  # else it has been swept in between
            return file
        file.close()


@contextmanager
def _locked(path: Path, going_on: Callable[[], None]) -> Iterator[None]:
    """Have a file locked, which is removed after it."""
    while True:
        with open(path, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                going_on()
                time.sleep(LOOK_S)
                continue
            if os.fstat(lock.fileno()).st_nlink:  # else who had it before has removed it
                try:
                    yield
                finally:
                    path.unlink()
                return


def _fetch(place: ClusterPlace, path: Path, coordinator: str, going_on: Callable[[], None]) -> None:
    _sweep(path.parent)
    draft = path.with_suffix(_DRAFT)
    with open(draft, "wb") as file:
        _copy(place, path.name, coordinator, file, going_on)
    os.replace(draft, path)


def _copy(
    place: ClusterPlace, digest: str, coordinator: str, file: IO[bytes], going_on: Callable[[], None]
) -> None:
    """Fetch a content piece by piece, however often the coordinator is away for a while."""
    hashed, size, latest = hashlib.sha256(), -1, time.monotonic()
    while file.tell() != size:
        going_on()
        try:
            with place.connect(locate(place, coordinator, timeout_s=PIECE_S), timeout_s=PIECE_S) as client:
                while file.tell() != size:
                    request = ContentRequest(digest, file.tell())
                    answer = client.call("content", request, reply_type=int)
                    (piece,) = answer.frames
                    size = answer.body
                    if not piece.nbytes or file.tell() + piece.nbytes > size:
                        raise MessageError(f"a piece of {piece.nbytes} bytes at {file.tell()} of {size}")
                    file.write(piece)
                    hashed.update(piece)
                    latest = time.monotonic()
                    going_on()
        except DPFlowError as error:
            if time.monotonic() - latest >= FETCH_S:
                raise
            SERVICE.warning("what its flow loads cannot be fetched and is asked for again (%s)", error)
            time.sleep(RETRY_S)
    if hashed.hexdigest() != digest:
        raise MessageError(f"what came is not the content {digest}")


def _sweep(folder: Path) -> None:
    """Remove the contents that no process of this host has open."""
    for path in folder.iterdir():
        if not path.suffix:
            with suppress(OSError), open(path, "rb") as file:  # another has removed it, or it is in use
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
