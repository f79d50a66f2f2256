"""One epoch of one job: a thread that asks ahead, fetches, puts batches together, and keeps them in order."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch_dpflow.backoff import Backoff
from torch_dpflow.errors import (
    DPFlowError,
    ErrorKind,
    MessageError,
    PeerLostError,
    PoisonTaskError,
    RemoteCallError,
    UsageError,
    WorkerError,
)
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.remote.job.putting_together import Came, came_of, put_together
from torch_dpflow.remote.job.ready_batches import TAKEN, Ready, ReadyBatches
from torch_dpflow.remote.job.router_link import RouterLink
from torch_dpflow.remote.job.shard_link import Fetch, FetchOutcome, ShardLinks, Wanted
from torch_dpflow.remote.job.stop_signal import StopSignal

#: The longest pauses before a fetch that failed is tried again, after the first time and after many, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
#: How long `close` waits for what is under way before it breaks that off, seconds.
CLOSE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How far ahead an epoch is read (thesis 3.4.2: P_L and P_R).

    Args:
        ready: batches that are put together ahead of need.
        fetched: batches under way from the shards.
        asked: batches that shards are told of ahead of need, more than those.
        budget_bytes: most bytes of batches under way, but for one batch.
        patience_s: how long the cluster may be away before the iterator gives up.
        loading_s: how much longer samples may take to come where the cluster answers.
    """

    ready: int
    fetched: int
    asked: int
    budget_bytes: int
    patience_s: float
    loading_s: float


@dataclass(slots=True)
class _Batch:
    number: int
    wanted: list[Wanted]
    #: By ticket, what has come: a parcel and its frames, or an error in its place.
    values: dict[int, Came] = field(default_factory=dict)
    fetches: list[Fetch] = field(default_factory=list)
    nbytes: int = 0
    #: How often a shard has failed over a call for it.
    faults: int = 0

    @property
    def missing(self) -> list[Wanted]:
        return [one for one in self.wanted if one.ticket not in self.values]

    @property
    def is_deadly(self) -> bool:
        """Whether there will be an error in its place, whatever else comes."""
        return any(isinstance(value, PoisonTaskError) for value in self.values.values())


class SharedIterator:
    """Hands out the batches of a plan in order, each sample once.

    Iterate in one thread. `close` may be called in any, and is when the epoch is over. Control-C in that thread, at
    any of its steps, loses no batch: the next call hands it out.

    Args:
        links: to the shards.
        plan: the keys of each batch; read in the iterator's thread, ahead of need.
        assemble: makes a batch of its samples, in that thread.
        draw: decides, with a sample's key, what is drawn by chance; None: the flow's first part alone is read.
        tickets: the job's, never used twice.
        delivered: called with the number of each batch that was handed out, its keys, and how many samples were until
            then; twice where it was interrupted.
        meter: counts what is handed out and how long it was waited for.
        closed: set when nobody wants the rest.
    """

    def __init__(
        self,
        router: RouterLink,
        links: ShardLinks,
        plan: Iterator[Sequence[int]],
        *,
        epoch: int,
        draw: int | None,
        tickets: Iterator[int],
        assemble: Callable[[list[Any]], Any],
        delivered: Callable[[int, list[int], int], None],
        meter: LoaderMeter,
        pipeline: Pipeline,
        closed: StopSignal,
    ) -> None:
        self._router = router
        self._links = links
        self._plan = plan
        self._epoch = epoch
        self._draw = draw
        self._tickets = tickets
        self._assemble = assemble
        self._delivered = delivered
        self._meter = meter
        meter.begin_epoch()
        self._pipeline = pipeline
        self._closed = closed
        self._ready = ReadyBatches(pipeline.ready, closed)
        #: Batches that were read of the plan, taken and counted, and samples that were put together.
        self._planned = self._given = self._counted = self._samples = 0
        #: What has ended the epoch before its end.
        self._failure = ""
        #: Batches that shards have been told of, the oldest first; those before the end of `_fetching` are fetched.
        self._asked: deque[_Batch] = deque()
        self._fetching = 0
        self._exhausted = False
        self._mean_bytes = 0.0
        self._thread = threading.Thread(target=self._run, name="dpflow-read", daemon=True)
        self._thread.start()

    def __iter__(self) -> SharedIterator:
        return self

    def __next__(self) -> Any:
        ready = self.head()
        value = ready.value
        ready.value = TAKEN
        return value

    def head(self, timeout_s: float | None = None) -> Ready:
        """Wait for the batch whose turn it is; it stays that until its value is set to `TAKEN`.

        Raises StopIteration at the end, what has ended the epoch before that, WorkerError from then on, and what came
        in the batch's place, which is taken then. LoaderTimeoutError where nothing comes within `timeout_s`.
        """
        self.settle()
        with self._meter.waiting():
            ready = self._ready.next(timeout_s)
        if ready is None or ready.is_last:
            self.close()
            raise self._end(ready)
        if ready.number >= self._counted:
            self._meter.delivered(len(ready.keys), ready.nbytes)
            self._counted = ready.number + 1
        error = ready.error
        if error is None:
            return ready
        ready.value = TAKEN
        if isinstance(error, BaseException):
            raise error
        error.reraise()
        raise AssertionError("an ExceptionWrapper has raised nothing")

    def settle(self) -> None:
        """Have noted what was taken."""
        ready = self._ready.in_hand
        if ready is not None and ready.value is TAKEN:
            self._delivered(ready.number, ready.keys, ready.end)
            self._given = ready.number + 1
            self._ready.done()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to be handed out, or nobody who wants it."""
        return self._closed.is_set() or self._is_complete

    @property
    def _is_complete(self) -> bool:
        self.settle()
        return self._exhausted and self._given == self._planned

    def _end(self, last: Ready | None) -> BaseException:
        """Why there are no more batches."""
        if last is not None and isinstance(last.error, BaseException):
            # It is not kept: it will hold the frames that it is raised through, and those this iterator.
            error, last.error = last.error, None
            self._failure = (
                f"this iteration was ended by {type(error).__name__}: {error}; begin another one, or resume from the "
                "loader's state_dict()"
            )
            return error
        if self._failure:
            return WorkerError(self._failure)
        if self._is_complete:
            return StopIteration()
        return UsageError(
            f"this reading of epoch {self._epoch} was given up before its end, as its job was closed or began another "
            "epoch; read an epoch to its end before the next one, or open another job for that"
        )

    def abandon(self) -> None:
        """Have the thread stop and give back what was asked for; nothing is waited for. A finalizer may call."""
        self._closed.set()
        self._ready.wake()

    def close(self) -> bool:
        """Stop reading; what was asked for is given back. Any thread may call, again too.

        Returns whether it has stopped: its own thread, in which `assemble` and the plan run, cannot wait for that.
        """
        self.abandon()
        if threading.current_thread() is self._thread:
            return False
        self.settle()
        deadline = time.monotonic() + (0.0 if self._router.contact.is_lost else CLOSE_S)
        while self._thread.is_alive():
            if time.monotonic() >= deadline:
                self._links.interrupt()
                self._router.interrupt()
                deadline = time.monotonic() + CLOSE_S  # what is given back then is to arrive
            self._thread.join(0.01)
        self._ready.clear()
        return True

    # -- the iterator's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            while not self._closed.is_set() and self._ask_ahead():
                self._fetch_ahead()
                self._hand_out(self._complete(self._asked[0]))
        except _Closed:
            pass
        except BaseException as error:
            end = error
        self._give_back()
        self._ready.put(
            Ready(self._planned, None, [], self._samples, end, is_last=True), self._take_what_came
        )

    def _ask_ahead(self) -> bool:
        """Tell shards of coming batches, several at a time; whether there are any left to hand out."""
        wanted: list[Wanted] = []
        # Each message wakes a shard, on a processor that has better things to do.
        together = min(self._pipeline.asked // 4, self._pipeline.asked - self._pipeline.fetched)
        begins = len(self._asked) <= self._pipeline.asked - max(1, together)
        while begins and not self._exhausted and len(self._asked) < self._pipeline.asked:
            keys = next(self._plan, None)
            if keys is None:
                self._exhausted = True
                break
            batch = _Batch(self._planned, [Wanted(next(self._tickets), key) for key in keys])
            self._planned += 1
            self._asked.append(batch)
            wanted += batch.wanted
        if wanted:
            self._links.want(wanted)
        return bool(self._asked)

    def _fetch_ahead(self) -> None:
        """Begin to fetch the oldest batches, as many as the budget allows, and say what else is wanted."""
        most = self._pipeline.fetched
        if self._mean_bytes:
            most = min(most, int(self._pipeline.budget_bytes / self._mean_bytes))
        for batch in itertools.islice(self._asked, self._fetching, max(1, most)):
            batch.fetches = self._links.fetch(batch.wanted, epoch=self._epoch, draw=self._draw)
            self._fetching += 1
        self._links.say(epoch=self._epoch, draw=self._draw)

    def _complete(self, batch: _Batch) -> _Batch:
        """Wait until every sample of a batch is here, asking again for what was lost on the way."""
        since = time.monotonic()
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            came = 0
            fetches, batch.fetches = batch.fetches, []
            for fetch in fetches:
                if batch.is_deadly:
                    break
                outcome = self._take(batch, fetch)
                came += len(outcome.samples)
                if self._closed.is_set():
                    raise _Closed
                if outcome.error is not None:
                    self._mend(outcome.error, batch, since, backoff)
            missing = batch.missing
            if batch.is_deadly:
                self._links.give_back(missing, epoch=self._epoch, draw=self._draw)
                break
            if not missing:
                break
            if came:
                since = time.monotonic()
                backoff.reset()
            batch.fetches = self._links.fetch(missing, epoch=self._epoch, draw=self._draw)
        self._asked.popleft()
        self._fetching -= 1
        self._mean_bytes += (batch.nbytes - self._mean_bytes) * (0.2 if self._mean_bytes else 1.0)
        return batch

    def _take(self, batch: _Batch, fetch: Fetch) -> FetchOutcome:
        """Wait for the answer to a fetch, and note what it brings."""
        outcome = self._links.finish(fetch)
        batch.nbytes += outcome.nbytes
        for sample, frames in outcome.samples:
            batch.values[sample.ticket] = came_of(sample, frames)
        return outcome

    def _take_what_came(self) -> None:
        """The training loop pauses: what shards hold of answered fetches is room that other jobs may wait for."""
        for batch in itertools.islice(self._asked, self._fetching):
            fetches, batch.fetches = batch.fetches, []
            for fetch in fetches:
                if fetch.pending.done:
                    self._take(batch, fetch)  # what failed of it is missing, and asked for again
                else:
                    batch.fetches.append(fetch)
        with suppress(DPFlowError):  # it is said with the next call
            self._links.give_back([], epoch=self._epoch, draw=self._draw)

    def _mend(self, error: DPFlowError, batch: _Batch, since: float, backoff: Backoff) -> None:
        """Find out what is out of date, so that the next attempt goes where it should.

        since: when something came last.
        """
        contact, pipeline = self._router.contact, self._pipeline
        deadline = pipeline.patience_s + min(since + pipeline.loading_s, max(since, contact.heard_at))
        if time.monotonic() >= deadline:
            raise self._router.contact.given_up(error) from error
        match error.kind if isinstance(error, RemoteCallError) else None:
            case ErrorKind.STALE_JOB:
                self._router.rejoin(self._router.id.generation, self._closed, deadline)
                return
            case ErrorKind.STALE_ROUTING:
                known = self._router.routes.generation
                self._router.refresh_routes(self._closed, deadline)
                if self._router.routes.generation != known:
                    return
                # Another flow's shard listens where its own did, and the router does not know yet.
            case ErrorKind.USAGE:
                raise UsageError(str(error)) from error
            case ErrorKind.OVERLOADED | ErrorKind.FORGOTTEN:
                pass
            case ErrorKind.INTERNAL:
                batch.faults += 1
                self._router.contact.failed(error, batch.faults)
            case None if not isinstance(error, MessageError):
                self._router.refresh_routes(self._closed, deadline)  # the shard is gone, or somewhere else
            case _:
                raise error
        self._closed.wait(backoff.pause_s())

    def _hand_out(self, batch: _Batch) -> None:
        came = [batch.values.get(one.ticket) for one in batch.wanted]
        keys = [one.key for one in batch.wanted]
        # Nothing of a batch may stay in the frame while the next one is waited for.
        batch.values.clear()
        if not self._exhausted or self._asked:
            self._ask_ahead()
            self._fetch_ahead()
        else:
            self._links.give_back([], epoch=self._epoch, draw=self._draw)
        self._samples += len(keys)
        ready = Ready(batch.number, None, keys, self._samples, nbytes=batch.nbytes)
        put_together(ready, came, self._assemble)
        self._ready.put(ready, self._take_what_came)

    def _give_back(self) -> None:
        left = [one for batch in self._asked for one in batch.wanted]
        try:
            self._links.give_back(left, epoch=self._epoch, draw=self._draw)
        except (DPFlowError, PeerLostError):
            return  # its lease lapses


class _Closed(Exception):
    """The iterator was closed while its thread waited."""
