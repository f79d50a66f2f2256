"""Shows the loaders of this process on a live page, for `LoaderOptions(watch=...)` and `DPFLOW_WATCH`.

The page is served by a process of its own, which a thread tells once a second how the loaders stand: the training
process imports no server, and neither a batch nor a worker takes another way.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

import msgspec

from torch_dpflow.log import LOADER
from torch_dpflow.periodic import PeriodicCall
from torch_dpflow.remote.observe.cluster_figures import JobRow
from torch_dpflow.remote.observe.http_address import listen_at
from torch_dpflow.remote.observe.page_access import TOKEN_FILE, PagePlace, check_page
from torch_dpflow.remote.observe.page_figures import RUNNING, Observation, ProcessRow
from torch_dpflow.remote.wire.shard import MemberView

#: Names the address, for loaders whose options have none.
VARIABLE = "DPFLOW_WATCH"
#: The time between two reports, and how long the page's process may take to end, seconds.
INTERVAL_S, END_S = 1.0, 2.0
#: Most characters of how a worker ended.
_MOST_TEXT = 300


def watch(loader: Any, address: str | None) -> None:
    """Show this loader at HOST:PORT, or where `DPFLOW_WATCH` says. Raises as `check_page`.

    If another process has that address, a warning says so, and the loader is not shown.
    """
    name = VARIABLE if address is None else "watch"
    chosen = os.environ[VARIABLE] if address is None else address
    place = check_page(name, chosen, os.environ.get(TOKEN_FILE), vacant=False)
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
    """The page of this process at one address, with its thread and its process.

    Raises OSError: it cannot listen there, or no process can be started.
    """

    def __init__(self, place: PagePlace) -> None:
        self._loaders: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._count = 0
        script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
        title = f"{script}, pid {os.getpid()}"
        with listen_at(place.host, place.port) as listener:
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch_dpflow.remote.observe.watch_page", str(number), title],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(number,),
                start_new_session=True,  # Control-C is for the training alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin
        self._send(place)
        self._thread = PeriodicCall(
            self._report, INTERVAL_S, "dpflow-watch", what="the report to the live page"
        )
        self._thread.wake()
        self._thread.start()
        self._owner = os.getpid()
        atexit.register(self._close)
        LOADER.info("the live page of this process is at %s", place.url)

    def add(self, loader: Any) -> None:
        """Show this loader too, for as long as it lives."""
        self._count += 1
        self._loaders[self._count] = loader

    def _report(self) -> None:
        rows: list[ProcessRow] = []
        jobs: list[JobRow] = []
        restarts = 0
        for number, loader in sorted(self._loaders.items()):
            name = f"{type(loader.dataset).__name__} {number}"
            stats = loader.stats()
            restarts += stats.restarts
            jobs.append(
                JobRow(
                    flow="",
                    job=name,
                    stall_s=stats.stall_s,
                    reading_s=stats.stall_s / stats.stall_share if stats.stall_share else 0.0,
                    batches=stats.batches,
                    samples=stats.samples,
                    bytes=stats.bytes,
                )
            )
            with suppress(RuntimeError):  # they change meanwhile, and are told in a second
                rows += _workers_of(loader, name)
        try:
            self._send(Observation(jobs=jobs, processes=rows, limits={"": "loading"}, restarts=restarts))
        except (BrokenPipeError, ValueError):
            self._thread.stop()
            if not sys.is_finalizing():
                LOADER.warning("the live page of this process has ended, and is not started again")

    def _send(self, what: PagePlace | Observation) -> None:
        self._pipe.write(msgspec.json.encode(what) + b"\n")
        self._pipe.flush()

    def _close(self) -> None:
        if os.getpid() != self._owner:
            return
        self._thread.stop()
        with suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _workers_of(loader: Any, name: str) -> list[ProcessRow]:
    """The workers of the loader's latest iteration."""
    iterator = loader._runtime.iterator()
    shard = None if iterator is None else iterator._shard
    if shard is None:
        return []
    ends, found = iterator._restarts.ends, []
    local = shard.processes.local
    for handle in () if local is None else local.handles:
        end = ends.get(int(handle.name.rpartition("-")[2]), "")
        incarnation = handle.incarnation if end else 0  # not before the cause is known
        found.append(
            ProcessRow(
                id=f"{name}/{handle.name}",
                flow="",
                role="worker",
                state=RUNNING,  # one that has ended is replaced at once
                where=f"pid {handle.pid}",
                incarnation=incarnation,
                restarts=incarnation,
                ended=end.partition("\n")[0][:_MOST_TEXT],
            )
        )
    members: Callable[[], list[MemberView]] = getattr(shard.processes, "views", list)
    return found + [
        ProcessRow(id=member.name, flow="", role="worker", state=member.state, where=member.where)
        for member in members()
    ]


_lock = threading.Lock()
#: By process and address; None: it cannot be had.
_pages: dict[tuple[int, str, int], _WatchedLoaders | None] = {}
