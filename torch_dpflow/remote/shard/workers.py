"""The workers of a shard of samples: their processes, their shared memory, and what they bring."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_dpflow.errors import DescriptorLimitError, MessageError
from torch_dpflow.remote.parcel.fast_path import encode_sample
from torch_dpflow.remote.pool.objects import Load
from torch_dpflow.remote.process.spec import SERVICE
from torch_dpflow.remote.scheduler import Scheduler
from torch_dpflow.remote.shard.detached_parcel import Settled, plain, settle
from torch_dpflow.remote.shard.engine import Shard
from torch_dpflow.remote.shm.arena import ArenaReader
from torch_dpflow.remote.shm.arena_peers import ArenaPeers
from torch_dpflow.remote.shm.running_task import RunningTaskReader
from torch_dpflow.remote.transport import Listener
from torch_dpflow.remote.wire.headers import Finished, WorkerHello
from torch_dpflow.remote.wire.sample_task import pack_task
from torch_dpflow.remote.wire.shard import FAILED, POISON_LIMIT, POISONED, SAMPLE
from torch_dpflow.remote.wire.worker import GREETING, SHARD_ID_BYTES
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
class _FlowWorker:
    #: Which of the processes under its number.
    incarnation: int
    #: Of its shared memory; None where that cannot be read here.
    reader: ArenaReader | None
    #: Where it writes which task it is at; None where it does not, or cannot be read.
    running: RunningTaskReader | None
    #: Whether its end is seen here: it shares memory, and the kernel tells.
    is_watched: bool = False
    #: Whether it is to be ended.
    is_ending: bool = False


class ShardWorkers:
    """Has samples loaded by whatever workers say hello; their node starts them and starts them again.

    Args:
        listener: where workers connect; the caller receives, and hands on what comes from them to `hear`.
        content: the digest of what they load, which they fetch themselves.
        workers: how many there are to be.
        loaded: called with the numbers of loads and what each came to. Not while `hear` is at work: `flush` calls.
        end: called with the number and incarnation of a worker that is to be ended, which is its node's to do.
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
        self._workers: dict[int, _FlowWorker] = {}
        self._arrived: list[tuple[int, Settled]] = []
        #: Loads of which only the rest is done here, and how many of them have been: nothing was decoded for them.
        self._rests: set[int] = set()
        self._rests_done = 0
        #: How many workers have ended before they were ready, since one was.
        self._false_starts = 0
        self._peers = ArenaPeers()
        #: The newest process that has said hello under each number.
        self._newest: dict[int, int] = {}

    def resize(self, workers: int) -> None:
        """So many there are to be from now on."""
        self._expected = workers
        self._false_starts = 0  # among them are those that have gone because fewer are to be

    @property
    def unwatched(self) -> dict[int, int]:
        """The incarnations of workers whose end is not seen here, by number: `ended` is to tell of it."""
        return {
            number: worker.incarnation for number, worker in self._workers.items() if not worker.is_watched
        }

    def ended(self, number: int, incarnation: int) -> None:
        """A worker has ended, or another has taken its place."""
        worker = self._workers.get(number)
        if worker is not None and worker.incarnation == incarnation:
            self._lose(number, worker)

    def load(self, loads: Sequence[Load]) -> None:
        """Have these loaded, in this order."""
        tasks = [(one.load, pack_task(one.key, one.draw, one.input and one.input.parcel)) for one in loads]
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
        for number in self._peers.ended():
            self._lose(number, self._workers[number])
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

    def _lose(self, number: int, worker: _FlowWorker) -> None:
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
        self._workers.pop(number, None)
        self._peers.forget(number)

    # -- what the shard asks of us (`Requester`) ---------------------------------------------------------

    def refusal(self, hello: WorkerHello) -> str:
        # Nodes start them, and how many there are is theirs to know.
        newest = self._newest.get(hello.worker, hello.incarnation)
        return "" if hello.incarnation >= newest else f"incarnation {newest} has taken its place"

    def shares_memory(self, hello: WorkerHello) -> bool:
        before = self._workers.get(hello.worker)
        if before is not None and before.incarnation != hello.incarnation:
            self._lose(hello.worker, before)  # another has taken its place before that was seen
        self._dismiss(hello.worker)
        reader = ArenaReader(hello.pid)
        shares = hello.probe is not None and reader.probe(hello.probe)
        worker = _FlowWorker(hello.incarnation, None, None)
        if shares:
            worker.running = RunningTaskReader.open(reader, hello.running)
            worker.reader, worker.is_watched = reader, self._peers.watch(hello.worker, hello.pid)
        self._workers[hello.worker], self._newest[hello.worker] = worker, hello.incarnation
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
        if known is not None and not known.is_ending:
            known.is_ending = True
            self._end(worker, known.incarnation)

    def overdue(self, worker: int) -> None:
        text = "it has been at one sample, or at its start, for more than task_timeout_s=%g s and is killed"
        SERVICE.warning(text, self._task_timeout_s, extra={"worker": worker})
        self.failed(worker)
