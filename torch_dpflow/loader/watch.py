"""Live page of the loaders of this process, for `LoaderOptions(watch=...)` and `DPFLOW_WATCH`.

A separate process serves the page; a thread sends it the loaders' figures once a second. The training process imports
no server, and batches take the same way as without the page.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from torch.utils.data import get_worker_info

from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.monitoring.cluster_figures import JobRow
from torch_dpflow.cluster.monitoring.page_access import TOKEN_FILE, PagePlace, check_page, listen_at
from torch_dpflow.cluster.monitoring.page_figures import RUNNING, Observation, ProcessRow
from torch_dpflow.ipc.messages.remote_worker import RemoteWorkerView
from torch_dpflow.loader.runtime import Workload
from torch_dpflow.log import LOADER
from torch_dpflow.workers.platform import Handle

#: The environment variable with the address for loaders whose options have none.
VARIABLE = "DPFLOW_WATCH"
#: The time between two reports, seconds.
INTERVAL_S = 1.0
#: The time between two explanations of a loader, seconds. Each reads a few files in /proc for every worker.
LOOK_S = 5.0
#: Maximum characters of a worker's exit report.
_MAX_TEXT = 300


def watch(loader: Any, address: str | None) -> None:
    """Show this loader at `address` (HOST:PORT; None: the value of `DPFLOW_WATCH`). Does nothing in a worker process.

    LOCAL_RANK is added to the port, so that each process of a training run has a separate port. If the address cannot
    be used, a warning is logged and the loader is not shown.

    Raises the errors of `check_page`.
    """
    if get_worker_info() is not None:
        return  # the loader that has started this process may be shown
    name = VARIABLE if address is None else "watch"
    chosen = os.environ[VARIABLE] if address is None else address
    place = check_page(name, chosen, os.environ.get(TOKEN_FILE) or None, vacant=False)
    rank = os.environ.get("LOCAL_RANK", "")
    if re.fullmatch("[0-9]{1,4}", rank) and place.port + int(rank) < 1 << 16:
        place = msgspec.structs.replace(place, port=place.port + int(rank))
    with _lock:
        key = os.getpid(), place.host, place.port  # a fork has neither the thread nor the page
        if key not in _pages:
            try:
                _pages[key] = _WatchedLoaders(place)
            except OSError as error:
                text = "%s=%r: %s; the loaders of this process are not shown there"
                LOADER.warning(text, name, chosen, error.strerror or error)
                _pages[key] = None
        page = _pages[key]
    if page is not None:
        page.add(loader)


class _WatchedLoaders:
    """Page of this process's loaders at one address, with the thread and the process that serve it.

    Raises OSError if the address cannot be used, or no process can be started.
    """

    def __init__(self, place: PagePlace) -> None:
        #: The training appends, the thread removes.
        self._loaders: list[_WatchedLoader] = []
        self._count = 0
        script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
        rank = f", rank {os.environ['RANK']:.20}" if os.environ.get("RANK") else ""
        title = f"{script}{rank}, pid {os.getpid()}"
        with listen_at(place.host, place.port) as listener:
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch_dpflow.cluster.monitoring.page_server", str(number), title],
                stdin=subprocess.PIPE,
                bufsize=0,  # a fork could send buffered data again
                stdout=subprocess.DEVNULL,
                pass_fds=(number,),
                start_new_session=True,  # Control-C is for the training only
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "PYTHONSAFEPATH": "1",  # modules come from where this process has them, not from its directory
                },
            )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin
        self._closing = False
        self._send(place)
        self._thread = PeriodicCall(self._report, INTERVAL_S, "dpflow-watch", what="the report to the live page")
        self._thread.wake()
        self._thread.start()
        self._owner = os.getpid()
        atexit.register(self._close)
        LOADER.info("the live page of this process is at %s", place.url)

    def add(self, loader: Any) -> None:
        """Show this loader too, for as long as it lives."""
        self._count += 1
        self._loaders.append(_WatchedLoader(loader, f"{type(loader.dataset).__name__} {self._count}"))

    def _report(self) -> None:
        jobs: list[JobRow] = []
        processes: list[ProcessRow] = []
        limits: dict[str, tuple[str, str]] = {}
        restarts = 0
        for watched in list(self._loaders):
            loader = watched.loader()
            if loader is None:
                self._loaders.remove(watched)
                continue
            restarts += loader._runtime.meter.restarts
            jobs.append(watched.figures(loader))
            with suppress(RuntimeError):  # an object changed while it was read; reported in a second
                processes += watched.workers(loader)
                limits[jobs[-1].key] = watched.limit(loader)
            del loader
        try:
            self._send(Observation(jobs=jobs, processes=processes, limits=limits, restarts=restarts))
        except BrokenPipeError:
            self._thread.stop()
            if not self._closing:
                LOADER.warning("the live page of this process has ended, and is not started again")

    def _send(self, what: PagePlace | Observation) -> None:
        rest = memoryview(msgspec.json.encode(what) + b"\n")
        while rest:
            rest = rest[self._pipe.write(rest) :]

    def _close(self) -> None:
        if os.getpid() != self._owner:
            return
        self._closing = True
        self._thread.stop()
        # Not by the pipe's end: forked workers have it too, and the thread may be writing to a page that is stuck.
        self._process.kill()
        self._process.wait()


class _WatchedLoader:
    """A loader on its page. Only the thread that reports the figures uses it."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = weakref.ref(loader)
        self._name = name
        self._workload = Workload(loader._runtime.meter)
        self._shard: Callable[[], Any] = lambda: None
        self._limit = "loading", ""
        #: The time of the next explanation, by `time.monotonic`.
        self._look_at = 0.0

    def figures(self, loader: Any) -> JobRow:
        meter = loader._runtime.meter
        stall_s, reading_s = meter.stall_s, meter.iterating_s
        waiting_s = meter.waiting_s()  # with a wait that still lasts
        return JobRow(
            flow=loader.flow or "",
            job=self._name,
            stall_s=stall_s + waiting_s,
            reading_s=reading_s + waiting_s,
            batches=meter.batches,
            samples=meter.samples,
            bytes=meter.bytes,
            times=None if loader.flow else meter.times.copy(),
        )

    def workers(self, loader: Any) -> list[ProcessRow]:
        iterator = loader._runtime.iterator()
        shard = None if iterator is None else iterator._shard
        if shard is None:
            return []
        if shard is not self._shard():
            self._shard = weakref.ref(shard)
            self._workload.begin(shard)
        ends = iterator._restarts.ends
        del iterator  # the training thread ends the workers when it drops the last reference
        local = shard.processes.local
        remote: Callable[[], list[RemoteWorkerView]] = getattr(shard.processes, "views", list)
        return [
            *(self._row(handle, ends) for handle in (() if local is None else local.handles)),
            *(
                ProcessRow(id=worker.name, flow="", role="worker", state=worker.state, where=worker.where)
                for worker in remote()
            ),
        ]

    def _row(self, handle: Handle, ends: Mapping[int, str]) -> ProcessRow:
        end = ends.get(int(handle.name.rpartition("-")[2]), "")
        return ProcessRow(
            id=f"{self._name}/{handle.name}",
            flow="",
            role="worker",
            state=RUNNING,  # one that has ended is replaced at once
            where=f"pid {handle.pid}",
            restarts=handle.incarnation if end else 0,  # not before the cause is known
            ended=end.partition("\n")[0][:_MAX_TEXT],
        )

    def limit(self, loader: Any) -> tuple[str, str]:
        """Return (what limits the loader while it waits, what to change)."""
        if time.monotonic() >= self._look_at:
            found, self._limit = loader._explain(self._workload), ("loading", "")
            if found.limited_by:
                self._look_at = time.monotonic() + LOOK_S
            if found.limited_by not in ("", "job"):  # "job": it waits little in all, and may wait now
                self._limit = found.limited_by, found.change.removeprefix("Change: ").rstrip(".")
        return self._limit


_lock = threading.Lock()
#: By process and address; None: the address is in use.
_pages: dict[tuple[int, str, int], _WatchedLoaders | None] = {}
