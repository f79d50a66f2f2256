"""Workers of a sample shard: their processes, their shared memory and their results."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.cluster.cache.objects import Load
from torch_dpflow.cluster.messages.shard import (
    FAILED,
    GREETING,
    POISON_LIMIT,
    POISONED,
    SAMPLE,
    SHARD_ID_BYTES,
    WINDOW,
    WORKERLESS,
    pack_task,
)
from torch_dpflow.cluster.shard.worker_messages import DetachedPayload, detach, detach_group, text_payload
from torch_dpflow.errors import DescriptorLimitError, MessageError
from torch_dpflow.ipc.memory.arena_reader import ArenaPeers, ArenaReader
from torch_dpflow.ipc.messages.fields import AwaitedWorkersError, LostWorkersError, RecoverableError
from torch_dpflow.ipc.messages.headers import Finished, PayloadTable, WorkerHandshake
from torch_dpflow.ipc.serialization.fast_path import encode_sample
from torch_dpflow.ipc.transport import Listener
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.fleet.content import SAMPLE_WORKERS
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.workers.platform import FALSE_STARTS, MAX_REPORT_CHARS, RETRY_S, shortened
from torch_dpflow.workers.scheduler.machine import Scheduler
from torch_dpflow.workers.shard import UNREACHABLE, Shard

#: Workers of this host hold more tasks than WINDOW, up to QUICK_WINDOW, if they run all of them within WINDOW_S
#: seconds: a message costs as much as several quick samples.
QUICK_WINDOW, WINDOW_S = 64, 0.06
#: Time after which other workers take over from a worker that runs one sample for much longer than usual (seconds): it
#: may be frozen, which its node notices only after `supervision.LEASE_S`.
OVERTAKE_S = 1.0
#: Time without a working worker after which waiting jobs get an error with the reason; also the interval between such
#: errors (seconds).
OUTAGE_S = 3.0
#: Maximum number of payload tables that are kept so that payloads with equal tables share one object.
MAX_TABLES = 256
#: Limits of a platform, from `worker_states.LIMITED_BY`, for which jobs wait longer than for lost workers.
AWAITED = ("quota", "throttling")


@dataclass
class _FlowWorker:
    incarnation: int
    #: Whether this process detects its end: it shares memory, and the kernel has pidfds.
    is_watched: bool = False
    is_ending: bool = False
    samples: int = 0
    #: Maximum number of tasks that it holds.
    window: int = WINDOW


class ShardWorkers:
    """Workers of a shard, and the loads that they run. The shard's node, or a platform, starts the workers.

    Args:
        listener: listener to which workers connect; the caller receives, and passes messages of workers to
            `on_message`.
        content: digest of the content, which workers fetch and load.
        workers: intended number of workers.
        loaded: called by `flush` with a list of (number, result) of finished loads.
        end: called with the number and incarnation of a worker that should be killed.
        task_timeout_s: as in `FlowSpec`.
        clock: returns the time (seconds). It should stand still while this process is suspended, so that workers are
            not blamed for the suspension.
    """

    def __init__(
        self,
        listener: Listener,
        content: str,
        workers: int,
        loaded: Callable[[list[tuple[int, DetachedPayload]]], None],
        *,
        end: Callable[[int, int], None],
        task_timeout_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = Scheduler(
            window=WINDOW,
            max_window=max(SAMPLE_WORKERS.max_window, QUICK_WINDOW),
            poison_limit=POISON_LIMIT,
            overtake_after_s=OVERTAKE_S,
            task_timeout_s=task_timeout_s,
        )
        self._task_timeout_s = task_timeout_s
        self._shard = Shard(listener, self._scheduler, self, clock=clock, start_timeout_s=task_timeout_s)
        self._window = WINDOW
        #: The intended number of workers; part of the answer to a handshake.
        self.expected = workers
        #: Distinguishes this shard from earlier and later ones, for workers.
        self._id = secrets.token_bytes(SHARD_ID_BYTES)
        self._content = content
        self._end = end
        #: Opens the platform that runs the workers, None: the node runs them; and its workers, once it is open.
        self._open: Callable[[], None] | None = None
        #: Returns the path of a local worker's exit report, given the worker's incarnation. None: there is no report.
        self.report_file: Callable[[int], str] | None = None
        self._remote: RemoteWorkers | None = None
        #: When the last worker stopped working, None while one works; and whether one ever has.
        self._none_since: float | None = clock()
        self._has_worked = False
        #: Why no workers are started, and until when; empty: they are.
        self._failure, self._failed_until = "", 0.0
        self._clock = clock
        self._loaded = loaded
        self._workers: dict[int, _FlowWorker] = {}
        self._arrived: list[tuple[int, DetachedPayload]] = []
        self._tables: dict[PayloadTable, PayloadTable] = {}
        #: How often samples were decoded. A task is twice the number of its load, plus 1 if it runs only the per-draw
        #: stage, which decodes nothing.
        self.decodes = 0
        #: How many workers have ended before they were ready, since the last one that was, and how the latest ended.
        self._false_starts = 0
        self._last_false_start = ""
        #: How the latest remote worker has ended; empty: none has.
        self._last_end = ""
        self._peers = ArenaPeers()
        #: Sums over workers of the seconds in which they were there, and in which they had tasks; counted until.
        self._worker_s = self._busy_s = 0.0
        self._counted_at = clock()
        #: How long the workers have taken to load, by stage.
        self.times = StageTimes()
        #: The newest incarnation that has connected, by number.
        self._newest: dict[int, int] = {}

    def use_platform(self, open_: Callable[[], None]) -> None:
        """Make a platform run the workers.

        open_: begins to open the platform; the caller then reports the outcome by `serve` or `fail`. Called again
            when samples are to be loaded after a failure.
        """
        self._open = open_
        open_()

    def serve(self, remote: RemoteWorkers) -> None:
        """Start the workers of an open platform. From now on, tasks are sent to these workers."""
        self._shard.sender, remote.shard, remote.shell = remote, self._shard, self
        self._remote = remote
        remote.resize(self.expected)
        remote.start_all()

    def resize(self, workers: int) -> None:
        self.expected = workers
        self._has_worked = self._has_worked and workers > 0
        self._false_starts = 0  # some may have ended because of a smaller number
        if self._remote is not None and not self._failure:
            self._remote.resize(workers)

    @property
    def unwatched(self) -> dict[int, int]:
        """Incarnations, by number, of workers whose end this process cannot detect. Report their ends by `ended`."""
        return {number: worker.incarnation for number, worker in self._workers.items() if not worker.is_watched}

    def ended(self, number: int, incarnation: int) -> None:
        """Handle the end of an `unwatched` worker. An incarnation that is not connected is ignored."""
        worker = self._workers.get(number)
        if worker is not None and worker.incarnation == incarnation:
            self._lose(number, worker)

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        """Handle the end of a remote worker. For the arguments see `remote_workers.Shell`."""
        known = self._workers.get(worker)
        if had_tasks and known is not None:
            self._lose(worker, known, how, may_blame=may_blame)
        elif how and not had_tasks:
            SERVICE.warning("%s, before it could work", how, extra={"worker": worker})

    def samples_of(self, number: int) -> int:
        """Return how many results a worker has delivered since it connected; 0 if it is not connected."""
        worker = self._workers.get(number)
        return 0 if worker is None else worker.samples

    def fail(self, error: Exception | str) -> None:
        """Fail loads with `error` while no worker works, for at least `RETRY_S` seconds."""
        self._failure, self._failed_until = str(error), self._clock() + RETRY_S
        SERVICE.error("no more workers: %s", error)

    def load(self, loads: Sequence[Load]) -> None:
        """Queue samples to be loaded, in this order. `flush` reports the results."""
        if self._failure and not self._may_load():
            self._arrived += [(one.load, text_payload(WORKERLESS, self._failure)) for one in loads]
            return
        self._shard.submit(
            [
                (2 * one.load + (one.input is not None), pack_task(one.key, one.draw, one.input and one.input.payload))
                for one in loads
            ]
        )

    def cancel(self, loads: Sequence[int]) -> None:
        self._shard.cancel([task for load in loads for task in (2 * load, 2 * load + 1)])

    def on_message(self, peer: bytes, frames: list[memoryview]) -> None:
        self._shard.on_message(peer, frames)

    def flush(self) -> None:
        """Call the constructor's function `loaded` with the loads that have finished since the last `flush`, if any."""
        while self._arrived:
            arrived, self._arrived = self._arrived, []
            self._loaded(arrived)

    def poll(self) -> None:
        """Handle workers that have ended, and apply time limits. Call this periodically."""
        now = self._clock()
        workers, busy = self._scheduler.workers
        self._worker_s += workers * (now - self._counted_at)
        self._busy_s += busy * (now - self._counted_at)
        self._counted_at = now
        for number in self._peers.ended():
            self._lose(number, self._workers[number])
        self._fit_windows()
        if not self._none_works():
            self._none_since, self._has_worked = None, True
            if self._open is None:
                self._failure = ""
        elif self._none_since is None:
            self._none_since = now
        self._check_false_starts()
        if self._failure and self._none_works():
            self._abandon(self._failure)
        self._shard.check_timeouts()

    def outage(self) -> RecoverableError | None:
        """Return the error for jobs once no worker has worked for `OUTAGE_S`; None otherwise.

        AwaitedWorkersError: workers start, or the platform is short of capacity; jobs wait longer (see `EpochReader`).
        LostWorkersError: remote workers were lost for another reason; jobs wait up to their `reconnect_timeout_s`.
        """
        if self._none_since is None or self._clock() - self._none_since < OUTAGE_S:
            return None
        remote = self._remote
        limited_by, details = ("", "") if remote is None else (remote.limited_by, remote.shortage)
        text = f"0 of {self.expected} workers of the flow run" + (f", {details}" if details else "") + self._starting()
        is_lost = remote is not None and self._has_worked and limited_by not in AWAITED
        return LostWorkersError(text) if is_lost else AwaitedWorkersError(text)

    def _starting(self) -> str:
        """Return the module that a starting worker imports, as text; of a worker of this host later also its stacks."""
        if self._remote is not None:
            return self._remote.importing
        for number, worker in self._workers.items():
            with suppress(OSError):
                if self.report_file is not None and self._shard.is_starting(number):
                    report = Path(self.report_file(worker.incarnation)).read_text(errors="replace").strip()
                    return f"; worker {number} starts: {shortened(report, MAX_REPORT_CHARS)}" if report else ""
        return ""

    @property
    def concurrency(self) -> int:
        """Maximum number of loads that should be in progress, running or queued."""
        return 2 * self._window * max(1, self.expected)

    def figures(self) -> dict[str, float]:
        counters = self._scheduler.counters
        return {
            "workers": len(self._workers),
            "working": self._scheduler.workers[0],
            "loads_done": counters.delivered + counters.duplicates,
            "worker_s": self._worker_s,
            "busy_s": self._busy_s,
            "decodes": self.decodes,
            "steals": counters.steals,
            "overtaken": counters.copies,
            "duplicates": counters.duplicates,
            "poisoned": counters.poisoned,
            "timeouts": counters.timeouts,
        }

    def _fit_windows(self) -> None:
        """Set how many tasks the workers of this host hold, by the usual duration of a task."""
        if self._open is not None:
            return  # it has its own rule, by round trips
        self._window = QUICK_WINDOW
        while self._window > WINDOW and self._window * self._scheduler.usual_s > WINDOW_S:
            self._window //= 2
        for number, worker in self._workers.items():
            if worker.window != self._window and not self._shard.is_starting(number):
                worker.window = self._window
                self._shard.set_window(number, self._window)

    def _may_load(self) -> bool:
        """Return whether loading may be tried after a failure: a worker is connected, or the pause is over."""
        if self._clock() < self._failed_until:
            return not self._none_works()
        self._failure, self._false_starts = "", 0
        if self._remote is not None:
            self._remote.resize(self.expected)
            self._remote.resume()
        elif self._open is not None:
            self._open()
        return True

    def _lose(self, number: int, worker: _FlowWorker, how: str = "", *, may_blame: bool = True) -> None:
        was_sent_away = self._remote is not None and not how
        # The node knows whether the end of its own worker was planned, and warns if not.
        log = SERVICE.warning if how else SERVICE.info
        text = "worker ended (incarnation %d%s); its samples are requeued"
        log(text, worker.incarnation, f": {how}" if how else "", extra={"worker": number})
        self._last_end = how or self._last_end
        self._remove(number)
        # Beyond the intended number, its node has ended it.
        may_blame = may_blame and number < self.expected
        if not was_sent_away and number < self.expected and self._shard.is_starting(number):
            self._false_starts += 1
            self._last_false_start = how
        self._shard.on_worker_lost(number, may_blame=may_blame)

    def _check_false_starts(self) -> None:
        """Fail all samples if every worker is killed or blocked by user code during its start."""
        if not self._false_starts:
            return
        if not self._none_works():
            self._false_starts = 0
        elif self._false_starts >= self.expected + FALSE_STARTS:
            text = (
                f"{self._false_starts} workers ended, or were killed after task_timeout_s, before they could load "
                "anything: while they unpickled the dataset, which imports its modules, or ran worker_init_fn"
            )
            self._false_starts = 0
            if self._remote is not None:
                self._remote.rest()
                text += f". The last one: {self._last_false_start}"
            self.fail(text)

    def _none_works(self) -> bool:
        return all(map(self._shard.is_starting, self._workers))

    def _abandon(self, text: str) -> None:
        self._arrived += [(task >> 1, text_payload(WORKERLESS, text)) for task in self._shard.abandon()]

    def _remove(self, number: int) -> None:
        self._workers.pop(number, None)
        self._peers.forget(number)

    # -- callbacks of the shard (`Requester`) ------------------------------------------------------------

    def refusal(self, handshake: WorkerHandshake) -> str:
        # Any number is accepted: the node that starts workers may know of a new size first.
        newest = self._newest.get(handshake.worker, handshake.incarnation)
        return "" if handshake.incarnation >= newest else f"incarnation {newest} has replaced it"

    def admitted(self, handshake: WorkerHandshake, *, shares_memory: bool) -> None:
        before = self._workers.get(handshake.worker)
        if before is not None and before.incarnation != handshake.incarnation:
            self._lose(handshake.worker, before)  # its end has not been seen yet
        self._remove(handshake.worker)
        # The platform reports the end of a remote worker, after its last messages were received.
        watched = shares_memory and self._open is None and self._peers.watch(handshake.worker, handshake.pid)
        self._workers[handshake.worker] = _FlowWorker(handshake.incarnation, watched)
        self._newest[handshake.worker] = handshake.incarnation

    def epoch_for(self, worker: int) -> bytes:
        return GREETING.pack(self._id, os.getpid(), self.expected) + self._content.encode()

    def begun(self, worker: int, frame: memoryview) -> None:
        raise MessageError(f"worker {worker} of a flow has no stream of its own")

    def timed(self, worker: int, times: StageTimes) -> None:
        self.times.add(times)

    def open(
        self, worker: int, reader: ArenaReader | None, finished: Finished, payloads: list[list[memoryview]]
    ) -> list[DetachedPayload]:
        kind = SAMPLE if finished.kind == SAMPLE else FAILED
        if kind == SAMPLE:
            self.decodes += sum([not task & 1 for task in finished.numbers])
        if finished.joined:
            return detach_group(kind, self._kept_table(finished.payload), finished.joined, payloads)
        opened = [self._detached(kind, finished.payload, frames, reader) for frames in payloads]
        for one in opened:
            one.table = self._kept_table(one.table)
        return opened

    def _kept_table(self, table: PayloadTable) -> PayloadTable:
        """Return the same object for equal tables, so that their payloads are sent as a group."""
        if len(self._tables) >= MAX_TABLES:
            self._tables.clear()
        return self._tables.setdefault(table, table)

    def _detached(
        self, kind: int, table: PayloadTable, frames: list[memoryview], reader: ArenaReader | None
    ) -> DetachedPayload:
        try:
            return detach(kind, table, frames, reader)
        except DescriptorLimitError as error:
            failure = ExceptionWrapper((type(error), error, None), "in a shard")
            own_table, own = encode_sample(failure, arena=None)
            return detach(FAILED, own_table, [memoryview(frame) for frame in own], None)

    def delivered(self, task: int, worker: int, finished: Finished, opened: DetachedPayload) -> None:
        self._arrived.append((task >> 1, opened))
        known = self._workers.get(worker)
        if known is not None:
            known.samples += 1

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        names = ", ".join(map(str, workers))
        text = f"loading it took down {len(workers)} workers one after the other (workers {names})"
        if late:
            text += f", {late} of them by taking longer than task_timeout_s={self._task_timeout_s:g} s"
        if self._last_end:
            text += f"; the last worker that ended {self._last_end}"
        self._arrived.append(
            (task >> 1, text_payload(POISONED, text))
        )  # the job gets from the node how its workers ended

    def starved(self) -> None:
        """Do nothing when workers have no tasks: jobs decide which samples are loaded."""

    def failed(self, worker: int, why: str) -> None:
        if (known := self._workers.get(worker)) is not None and not known.is_ending:
            known.is_ending = True
            level = logging.INFO if why is UNREACHABLE else logging.WARNING
            SERVICE.log(level, "worker killed: %s", why, extra={"worker": worker})
            if self._remote is not None:
                self._remote.kill(worker, why)
            else:
                self._end(worker, known.incarnation)

    def overdue(self, worker: int) -> None:
        self.failed(worker, f"more than task_timeout_s={self._task_timeout_s:g} s at one sample, or at its start")
