"""Traces of loaders: files of trace events for Perfetto and chrome://tracing, as `DPFLOW_TRACE` requests.

Each loader is a process in the trace. It has one track for the training loop, with waits and steps, and one track for
each worker, with batches, their stages, and deaths. Only the training process writes, so the death of a worker leaves
no gap. The file is valid JSON after every write.

The format is the JSON array of the "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
import threading
import time
from typing import Any

import msgspec
from torch.utils.data import get_worker_info

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.errors import OptionError
from torch_dpflow.log import LOADER

#: The environment variable with the path of the file.
VARIABLE = "DPFLOW_TRACE"
#: Maximum size of a file, bytes: about 500,000 events.
MAX_BYTES = 64 << 20
#: A new event causes a write if this many are buffered, or the last write was this long ago, seconds.
MAX_EVENTS, MAX_AGE_S = 1000, 1.0
#: The track of the training loop; worker `n` has track `n + 1`.
TRAINING = 0

_END = b"\n]\n"
#: Beginnings of files that may be replaced: an empty file, and traces without and with events.
_BEGINNINGS = (b"", b"[\n]", b"[\n{")


def trace(loader: Any) -> None:
    """Trace this loader in the file that DPFLOW_TRACE names. Does nothing in a worker process.

    Ranks of torchrun write files with their own names: `trace.json` becomes `trace-rank1.json`. If another process
    writes the file, a warning is logged and nothing is traced.

    Raises OptionError: the file cannot be written, or is not a trace.
    """
    if get_worker_info() is not None:
        return  # the loader that has started this process is traced
    path = os.path.abspath(os.environ[VARIABLE])
    if rank := os.environ.get("RANK", ""):
        root, extension = os.path.splitext(path)
        path = f"{root}-rank{rank:.20}{extension}"
    with _lock:
        key = os.getpid(), path
        if key not in _files:
            _files[key] = _opened(path)
        file = _files[key]
    if file is not None:
        loader._runtime.meter.trace = LoaderTrace(file, type(loader.dataset).__name__)


class TraceFile:
    """File of trace events. Thread-safe.

    Raises OSError if the file cannot be written or is no trace, BlockingIOError if another process writes it.
    """

    def __init__(self, path: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._events: list[dict[str, Any]] = []
        self._size = 0
        self._began = self._written_at = time.perf_counter()
        self._loaders = 0
        self._is_full = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise OSError("it is no regular file")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(self._descriptor, 3, 0) not in _BEGINNINGS:
                raise OSError("this file exists and is no trace: remove it, or name another")
            os.ftruncate(self._descriptor, 0)
            self._put(b"[", 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def new_loader(self) -> int:
        with self._lock:
            self._loaders += 1
            return self._loaders

    def microseconds(self, at: float) -> float:
        """Convert a time of `time.perf_counter` to microseconds since the start of the trace."""
        return round((at - self._began) * 1e6, 1)

    def add(self, *events: dict[str, Any]) -> None:
        """Add events, which this call, a later one or `flush` writes. No effect in a forked child or a full file."""
        if os.getpid() != self._owner:
            return  # a fork has the file too
        with self._lock:
            if self._is_full:
                return
            self._events += events
            if len(self._events) >= MAX_EVENTS or time.perf_counter() - self._written_at >= MAX_AGE_S:
                self._write()

    def flush(self) -> None:
        """Write all buffered events."""
        if os.getpid() == self._owner:
            with self._lock:
                self._write()

    def close(self) -> None:
        """Write all buffered events, and close the file."""
        self.flush()
        with self._lock:
            self._is_full = True
        os.close(self._descriptor)

    def _write(self) -> None:
        events, self._events = self._events, []
        self._written_at = time.perf_counter()
        if self._is_full or not events:
            return
        comma = b",\n" if self._size > 1 else b"\n"
        data = comma + b",\n".join([msgspec.json.encode(event) for event in events])
        if self._size + len(data) + len(_END) > self._max_bytes:
            self._is_full = True
            LOADER.warning("%s is full: it has %d bytes, and later events are not traced", self._path, self._size)
            return
        try:
            self._put(data, self._size)
        except OSError as error:
            self._is_full = True
            LOADER.warning("%s cannot be written, so events are not traced: %s", self._path, error.strerror or error)

    def _put(self, data: bytes, at: int) -> None:
        """Write data at offset `at`, where the array's closing bracket is, and the bracket after it."""
        if os.pwrite(self._descriptor, data + _END, at) != len(data) + len(_END):
            os.ftruncate(self._descriptor, at)
            os.pwrite(self._descriptor, _END, at)
            raise OSError("no space is left")
        self._size = at + len(data)


class LoaderTrace:
    """Events of one loader in a trace. Only the training thread uses it."""

    def __init__(self, file: TraceFile, name: str) -> None:
        self._file = file
        self._number = file.new_loader()
        #: When the latest event of each track ended, by `time.perf_counter`.
        self._ends: dict[int, float] = {}
        self._epoch, self._epoch_began = 0, 0.0
        file.add(self._named("process_name", TRAINING, f"loader {self._number}: {name}"))

    def epoch(self, epoch: int, at: float) -> None:
        """Add the start of an iteration, at the time `at` of `time.perf_counter`."""
        self._epoch, self._epoch_began = epoch, at
        self._track(TRAINING)
        self._ends[TRAINING] = at
        self._mark(TRAINING, "epoch", at, {"epoch": epoch})

    def waited(self, entered: float, left: float) -> None:
        """Add a call of `next()` that lasted from `entered` to `left`, and the training loop's step before it."""
        self._track(TRAINING)
        if (before := self._ends.get(TRAINING)) is not None and before < entered:
            self._span(TRAINING, "step", before, entered, {})
        self._span(TRAINING, "wait", entered, left, {"epoch": self._epoch})
        self._ends[TRAINING] = left

    def loaded(self, worker: int | None, batch: int, times: StageTimes, arrived: float) -> None:
        """Add a batch that `worker` (None: this process) loaded, with its stages' times; it arrived at `arrived`."""
        track = TRAINING if worker is None else worker + 1
        self._track(track)
        total = sum(times.stages.values())
        begin = arrived - total
        if worker is not None:  # times of threads add up to more than has passed
            begin = max(begin, min(arrived, self._ends.get(track, begin)))
        scale = (arrived - begin) / total if total else 0.0
        self._span(track, "batch", begin, arrived, {"batch": batch, "samples": times.samples, "epoch": self._epoch})
        at = begin
        for name, seconds in times.stages.items():
            if seconds:
                self._span(track, name, at, at + seconds * scale, {"seconds": round(seconds, 7)})
                at += seconds * scale
        if worker is not None:
            self._ends[track] = arrived

    def ended(self, worker: int, how: str) -> None:
        """Add the end of a worker, described by `how`."""
        self._track(worker + 1)
        self._mark(worker + 1, "worker ended", time.perf_counter(), {"how": how})
        self._file.flush()

    def _track(self, track: int) -> None:
        if track not in self._ends:
            self._ends[track] = self._epoch_began if track else time.perf_counter()
            name = "training loop" if track == TRAINING else f"worker {track - 1}"
            self._file.add(self._named("thread_name", track, name))

    def _named(self, kind: str, track: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._number, "tid": track, "args": {"name": name}}

    def _span(self, track: int, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        begin_us, end_us = self._file.microseconds(begin), self._file.microseconds(end)
        event = {"ph": "X", "name": name, "pid": self._number, "tid": track, "ts": begin_us, "args": args}
        self._file.add({**event, "dur": max(0.0, round(end_us - begin_us, 1))})

    def _mark(self, track: int, name: str, at: float, args: dict[str, Any]) -> None:
        event = {"ph": "i", "name": name, "pid": self._number, "tid": track, "s": "t", "args": args}
        self._file.add({**event, "ts": self._file.microseconds(at)})


def _opened(path: str) -> TraceFile | None:
    try:
        file = TraceFile(path)
    except BlockingIOError:
        LOADER.warning("%s=%r: another process writes it; this process is not traced", VARIABLE, path)
        return None
    except OSError as error:
        raise OptionError(
            f"{VARIABLE}={path!r} cannot be written: {error.strerror or error}; give the path of a file in a directory "
            "that exists"
        ) from error
    atexit.register(file.flush)
    return file


_lock = threading.Lock()
#: By process and path; None: another process writes it.
_files: dict[tuple[int, str], TraceFile | None] = {}
