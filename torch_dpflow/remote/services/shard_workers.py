"""The workers of a shard of samples: their processes, their shared memory, and what they bring."""

from __future__ import annotations

import os
import secrets
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch_dpflow.descriptors import exhausted, is_exhausted
from torch_dpflow.errors import DescriptorLimitError, MessageError
from torch_dpflow.remote.arena import ArenaReader
from torch_dpflow.remote.messages import Finished, WorkerHello
from torch_dpflow.remote.pool_objects import Load
from torch_dpflow.remote.protocol import FAILED, POISON_LIMIT, POISONED, SAMPLE
from torch_dpflow.remote.running_task import RunningTaskReader
from torch_dpflow.remote.sample_parcel import encode_sample
from torch_dpflow.remote.sample_task import pack_task
from torch_dpflow.remote.sample_worker import GREETING, SHARD_ID_BYTES
from torch_dpflow.remote.scheduler import Scheduler
from torch_dpflow.remote.services.post import SERVICE
from torch_dpflow.remote.services.shard import Shard
from torch_dpflow.remote.settled import Settled, plain, settle
from torch_dpflow.remote.transport import Listener
from torch_dpflow.torch_private import ExceptionWrapper

#: Tasks that a worker holds: those of a message's results, and some that wait meanwhile. Half of what torch's loader
#: gives a worker ahead of need, with batches of 16.
WINDOW = 16
#: How many workers more than there are to be may end before they are ready until samples are given up for it.
FALSE_STARTS = 2
#: A worker that is at one sample for so long, and for much longer than usual, is overtaken by others, seconds: it
#: may be frozen, and its node gives it `node.LEASE_S`.
OVERTAKE_S = 1.0


@dataclass
class _Worker:
    #: Which of the processes under its number.
    incarnation: int
    #: Of its shared memory; None where that cannot be read here.
    reader: ArenaReader | None
    #: Readable when the process has ended. None where the kernel has no such descriptors, or where nothing has proved
    #: that the process of the number that it tells of is the worker: it may run on another host or in a container.
    descriptor: int | None
    #: Where it writes which task it is at; None where it does not, or cannot be read.
    running: RunningTaskReader | None


class ShardWorkers:
    """Has samples loaded by whatever workers say hello; their node starts them and starts them again.

    Args:
        listener: where workers connect; the caller receives, and hands on what comes from them to `hear`.
        content: the digest of what they load, which they fetch themselves.
        workers: how many there are to be.
        loaded: called with the numbers of loads and what each came to. Not while `hear` is at work: `flush` calls.
        end: called with the number and incarnation of a worker that is to be ended and cannot be from here.
        task_timeout_s: as of `FlowSpec`.
        clock: seconds; should stand still while this process does, or workers pay for its pauses.
    """

    def __init__(
        self,
        listener: Listener,
        content: str,
        workers: int,
        loaded: Callable[[list[tuple[int, Settled]]], None],
        *,
        end: Callable[[int, int], None],
        task_timeout_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = Scheduler(
            window=WINDOW,
            poison_limit=POISON_LIMIT,
            overtake_after_s=OVERTAKE_S,
            task_timeout_s=task_timeout_s,
        )
        self._task_timeout_s = task_timeout_s
        self._shard = Shard(listener, self._scheduler, self, clock=clock, start_timeout_s=task_timeout_s)
        #: How many there are to be; workers that come are told so.
        self._expected = workers
        #: By which a worker tells it from the shard before or after it.
        self._id = secrets.token_bytes(SHARD_ID_BYTES)
        self._content = content
        self._end = end
        self._loaded = loaded
        self._workers: dict[int, _Worker] = {}
        self._arrived: list[tuple[int, Settled]] = []
        #: Loads of which only the rest is done here, and how many of them have been: nothing was decoded for them.
        self._rests: set[int] = set()
        self._rests_done = 0
        #: How many workers have ended before they were ready, since one was.
        self._false_starts = 0
        self._poller = select.poll()

    def resize(self, workers: int) -> None:
        """So many there are to be from now on."""
        self._expected = workers
        self._false_starts = 0  # among them are those that have gone because fewer are to be

    @property
    def unwatched(self) -> dict[int, int]:
        """The incarnations of workers whose end is not seen here, by number: `ended` is to tell of it."""
        return {
            number: worker.incarnation
            for number, worker in self._workers.items()
            if worker.descriptor is None
        }

    def ended(self, number: int, incarnation: int) -> None:
        """A worker has ended, or another has taken its place."""
        worker = self._workers.get(number)
        if worker is not None and worker.incarnation == incarnation:
            self._lose(number, worker)

    def load(self, loads: Sequence[Load]) -> None:
        """Have these loaded, in this order."""
        tasks = [(one.load, pack_task(one.key, one.draw, one.input)) for one in loads]
        self._rests.update(one.load for one in loads if one.input is not None)
        self._shard.submit(tasks)

    def cancel(self, loads: Sequence[int]) -> None:
        """Nobody wants these any more."""
        self._rests.difference_update(loads)
        self._shard.cancel(loads)

    def hear(self, peer: bytes, frames: list[memoryview]) -> None:
        """Take in one message of a worker."""
        self._shard.hear(peer, frames)

    def flush(self) -> None:
        """Hand on what has been loaded since the last call."""
        while self._arrived:
            arrived, self._arrived = self._arrived, []
            self._loaded(arrived)

    def look(self) -> None:
        """See which workers have ended, and which seem to have stopped."""
        ended = {descriptor for descriptor, _ in self._poller.poll(0)}
        if ended:
            for number, worker in list(self._workers.items()):
                if worker.descriptor in ended:
                    self._lose(number, worker)
        self._give_up_unless_workers_start()
        self._shard.tick()

    @property
    def decodes(self) -> int:
        """Samples that were loaded; what was drawn of those that are kept does not count."""
        counters = self._scheduler.counters
        return counters.delivered + counters.duplicates - self._rests_done

    def figures(self) -> dict[str, int]:
        """Counts for people."""
        counters = self._scheduler.counters
        return {
            "workers": len(self._workers),
            "decodes": self.decodes,
            "steals": counters.steals,
            "overtaken": counters.copies,
            "duplicates": counters.duplicates,
            "poisoned": counters.poisoned,
            "timeouts": counters.timeouts,
        }

    def _lose(self, number: int, worker: _Worker) -> None:
        text = "it has ended (incarnation %d); its samples go to others"
        SERVICE.warning(text, worker.incarnation, extra={"worker": number})
        self._dismiss(number)
        self._false_starts += number < self._expected and self._shard.is_starting(number)
        self._shard.lose(number, None if worker.running is None else worker.running.tasks())

    def _give_up_unless_workers_start(self) -> None:
        """Code that takes down or holds up every worker at its start is not waited for in silence."""
        if not self._false_starts:
            return
        if not all(map(self._shard.is_starting, self._workers)):
            self._false_starts = 0
        elif self._false_starts >= self._expected + FALSE_STARTS:
            text = (
                f"{self._false_starts} workers ended, or were killed after task_timeout_s, before they could load "
                "anything: while they unpickled the dataset or ran worker_init_fn; the cluster's log has more"
            )
            for task in self._shard.abandon():
                self._rests.discard(task)
                self._arrived.append((task, plain(POISONED, text)))

    def _dismiss(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        if worker is not None and worker.descriptor is not None:
            self._poller.unregister(worker.descriptor)
            os.close(worker.descriptor)

    # -- what the shard asks of us (`Requester`) ---------------------------------------------------------

    def admits(self, hello: WorkerHello) -> bool:
        return True  # nodes start them, and how many there are is theirs to know

    def shares_memory(self, hello: WorkerHello) -> bool:
        before = self._workers.get(hello.worker)
        if before is not None and before.incarnation != hello.incarnation:
            self._lose(hello.worker, before)  # another has taken its place before that was seen
        self._dismiss(hello.worker)
        reader = ArenaReader(hello.pid)
        shares = hello.probe is not None and reader.probe(hello.probe)
        worker = _Worker(hello.incarnation, None, None, None)
        if shares:  # and only then the process of this number here is the worker
            worker.running = RunningTaskReader.open(reader, hello.running)
            worker.reader, worker.descriptor = reader, _descriptor_of(hello)
        if worker.descriptor is not None:
            self._poller.register(worker.descriptor, select.POLLIN)
        self._workers[hello.worker] = worker
        return shares

    def epoch_for(self, worker: int) -> bytes:
        return GREETING.pack(self._id, os.getpid(), self._expected) + self._content.encode()

    def begun(self, worker: int, frame: memoryview) -> None:
        raise MessageError(f"worker {worker} of a flow has no stream of its own to tell of")

    def open(self, worker: int, finished: Finished, frames: list[memoryview]) -> Settled:
        known = self._workers.get(worker)
        kind = SAMPLE if finished.kind == SAMPLE else FAILED
        try:
            return settle(kind, finished.parcel, frames, None if known is None else known.reader)
        except DescriptorLimitError as error:
            failure = ExceptionWrapper((type(error), error, None), "in a shard")
            table, own = encode_sample(failure, arena=None)
            return settle(FAILED, table, [memoryview(frame) for frame in own], None)

    def delivered(self, task: int, worker: int, finished: Finished, opened: Settled) -> None:
        if task in self._rests:
            self._rests.discard(task)
            self._rests_done += 1
        self._arrived.append((task, opened))

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        self._rests.discard(task)
        names = ", ".join(map(str, workers))
        text = f"loading it took down {len(workers)} workers one after the other (workers {names})"
        if late:
            text += f", {late} of them by taking longer than task_timeout_s={self._task_timeout_s:g} s"
        self._arrived.append((task, plain(POISONED, text)))

    def starved(self) -> None:
        """Nothing to do: samples are ordered by their jobs."""

    def failed(self, worker: int) -> None:
        known = self._workers.get(worker)
        if known is None:
            return
        if known.descriptor is None:
            self._end(worker, known.incarnation)
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(known.descriptor, signal.SIGKILL)

    def overdue(self, worker: int) -> None:
        text = "it has been at one sample, or at its start, for more than task_timeout_s=%g s and is killed"
        SERVICE.warning(text, self._task_timeout_s, extra={"worker": worker})
        self.failed(worker)


def _descriptor_of(hello: WorkerHello) -> int | None:
    """A descriptor of a worker's process; None where there are no such. DescriptorLimitError: there are too many."""
    try:
        return os.pidfd_open(hello.pid)
    except OSError as error:
        if is_exhausted(error):  # it says hello again until there is one
            raise exhausted(f"worker {hello.worker} cannot be watched") from error
        return None
