"""Reading of one epoch by one job: a thread requests, fetches and collates samples ahead, in the order of the plan."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import StopSignal
from torch_dpflow.cluster.client.collate import LATER, ReadyBatch, ReadyBatches, Received, build_batch
from torch_dpflow.cluster.client.options import JobOptions
from torch_dpflow.cluster.client.shard_link import (
    EpochDraw,
    Fetch,
    ShardLinks,
    Wanted,
    batches_ahead,
    batches_together,
)
from torch_dpflow.cluster.messages.shard import POISON_LIMIT
from torch_dpflow.epoch.plan import TAKEN
from torch_dpflow.errors import (
    DPFlowError,
    ErrorKind,
    LoaderTimeoutError,
    RemoteCallError,
    UsageError,
    WorkerError,
)
from torch_dpflow.metrics import LoaderMeter

#: Longest pauses before a failed fetch is repeated, after the first failure and after many (seconds).
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
#: How long the reader's thread waits for the oldest fetch between checks of the others; length of a check (seconds).
LOOK_S, POLL_S = 0.1, 0.001
#: How long `close` waits for running calls before it interrupts these calls, and between two interrupts (seconds).
CLOSE_S, AGAIN_S = 0.7, 0.05


@dataclass(slots=True)
class _Batch:
    number: int
    wanted: list[Wanted]
    #: Received payloads, or errors in their place, by ticket. Batches that are fetched together share `values` and
    #: `fetches`, the calls that have not been answered yet.
    values: dict[int, Received] = field(default_factory=dict)
    fetches: list[Fetch] = field(default_factory=list)
    nbytes: int = 0
    #: How often a shard has failed at a call for this batch.
    faults: int = 0

    @property
    def missing(self) -> list[Wanted]:
        return [one for one in self.wanted if one.ticket not in self.values]

    @property
    def is_poisoned(self) -> bool:
        """Whether one of the batch's samples has failed, so that an error will be raised instead."""
        values = self.values
        return any(isinstance(values.get(one.ticket), WorkerError) for one in self.wanted)


class EpochReader:
    """Reader that delivers the batches of a plan in order, each once.

    Iterate in one thread. Any thread may call `close`; the reader is closed automatically at the end of the epoch.
    Control-C in the iterating thread, at any of its steps, loses no batch: the next call delivers it.

    Args:
        plan: iterated in the reader's thread; yields the keys of each batch, or `LATER` while the next is not known.
        of: the epoch, and the seed of its random draws.
        collate: makes a batch from a list of samples, in the reader's thread.
        delivered: called for each delivered batch with its number, its keys, and the number of samples of this and all
            earlier batches. After an interrupt it may be called twice for the same batch.
        meter: counts batches, and the time that the training loop waits for them.
        options: how far to read ahead, and how long to wait for samples.
        closed: signal that ends the epoch early.
        await_plan: called after `LATER` with a number of seconds; waits at most that long for the plan's next batch.
    """

    def __init__(
        self,
        links: ShardLinks,
        plan: Iterator[Sequence[int]],
        of: EpochDraw,
        *,
        collate: Callable[[list[Any]], Any],
        delivered: Callable[[int, list[int], int], None],
        meter: LoaderMeter,
        options: JobOptions,
        closed: StopSignal,
        await_plan: Callable[[float], object] | None = None,
    ) -> None:
        self._router = links.router
        self._links = links
        self._plan = plan
        self._of = of
        self._collate = collate
        self._delivered = delivered
        self._meter = meter
        meter.begin_epoch()
        self._options = options
        self._closed = closed
        self._await_plan = await_plan or closed.wait
        self._ready = ReadyBatches(options.ready, closed)
        #: Batches read from the plan, taken by the training loop, and counted; and collated samples.
        self._planned = self._given = self._counted = self._samples = 0
        #: The error that ended the epoch early.
        self._failure = ""
        #: Batches that were requested from shards, oldest first; the first `_fetching` of them are being fetched.
        self._requested: deque[_Batch] = deque()
        self._fetching = 0
        self._exhausted = False
        #: Moving averages over batches: bytes, and the time that the thread waits for one (seconds).
        self._mean_bytes = self._mean_wait_s = 0.0
        self._thread = threading.Thread(target=self._run, name="dpflow-read", daemon=True)
        self._thread.start()

    def __iter__(self) -> EpochReader:
        return self

    def __next__(self) -> Any:
        ready = self.head()
        value = ready.outcome
        ready.outcome = TAKEN
        return value

    def head(self, timeout_s: float | None = None) -> ReadyBatch:
        """Wait for the next batch, and return the same batch until its outcome is set to `TAKEN`.

        Raises:
            StopIteration: the epoch is over.
            LoaderTimeoutError: no batch arrived within `timeout_s`.
            WorkerError: an error has ended the epoch in an earlier call.
            UsageError: the reader was closed before the end of the epoch.

        Also raises the error that ends the epoch, and an error in place of a batch, which then counts as taken.
        """
        self.note_delivered()
        try:
            with self._meter.waiting():
                ready = self._ready.next(timeout_s)
        except LoaderTimeoutError as late:
            raise LoaderTimeoutError(f"{late}; {self._awaited()}") from None
        if ready is None or ready.is_last:
            self.close()
            raise self._end(ready)
        error = ready.error
        if error is None:
            if ready.number >= self._counted:
                self._meter.delivered(len(ready.keys), ready.nbytes)
                self._counted = ready.number + 1
            return ready
        ready.outcome = TAKEN
        if isinstance(error, BaseException):
            raise error
        error.reraise()
        raise AssertionError("an ExceptionWrapper has raised nothing")

    def _awaited(self) -> str:
        """Describe what the reader's thread waits for."""
        try:
            batch = self._requested[0]
        except IndexError:
            return "no samples have been requested for it yet"
        keys = repr([one.key for one in batch.missing])
        return f"it waits for index {keys:.400}"

    def note_delivered(self) -> None:
        """Call `delivered` for the batch that was taken last, if this has not been done yet."""
        ready = self._ready.in_hand
        if ready is not None and ready.outcome is TAKEN:
            self._delivered(ready.number, ready.keys, ready.end)
            self._given = ready.number + 1
            self._ready.done()

    @property
    def taken(self) -> int:
        """Number of batches that were taken, including batches in whose place an error was raised."""
        self.note_delivered()
        return self._given

    @property
    def is_fetching(self) -> bool:
        """Whether the reader's thread still runs, and can therefore call the flow's services."""
        return self._thread.is_alive()

    @property
    def is_over(self) -> bool:
        """Whether every batch was delivered, or the reader was closed."""
        return self._closed.is_set() or self._is_complete

    @property
    def _is_complete(self) -> bool:
        self.note_delivered()
        return self._exhausted and self._given == self._planned

    def _end(self, last: ReadyBatch | None) -> BaseException:
        """Return the exception to raise after the last batch: StopIteration, or the error that ended the epoch."""
        if last is not None and isinstance(last.error, BaseException):
            # Not kept: it will refer to the frames that it is raised through, and those to this iterator.
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
            f"this reading of epoch {self._of.epoch} was abandoned before its end, as its job was closed or began "
            "another epoch; read an epoch to its end before the next one, or open another job for that"
        )

    def abandon(self) -> None:
        """Make the reader's thread release its samples and end, without waiting for it. Finalizers call this."""
        self._closed.set()
        self._ready.wake()

    def close(self, deadline: float | None = None) -> bool:
        """Stop reading and release the requested samples. Any thread may call, repeatedly.

        deadline: when to interrupt running calls, by `time.monotonic`; None: `CLOSE_S` from now, or now in an outage.

        Returns whether the reader's thread has ended: False if that thread itself calls this, in `collate` or the plan.
        """
        self.abandon()
        if threading.current_thread() is self._thread:
            return False
        self.note_delivered()
        if deadline is None:
            deadline = time.monotonic() + (0.0 if self._router.outages.is_out else CLOSE_S)
        end_calls(self._thread, deadline, self._links)
        self._ready.clear()
        return True

    # -- the reader's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            while not self._closed.is_set() and self._request_ahead():
                if not self._requested:
                    self._await_plan(LOOK_S)
                    continue
                self._fetch_ahead()
                self._deliver(self._complete(self._requested[0]))
        except _Closed:
            pass
        except BaseException as error:
            end = error
        self._release_all()
        self._ready.put(ReadyBatch(self._planned, None, [], self._samples, end, is_last=True), self._take_answered)

    def _request_ahead(self) -> bool:
        """Request the next batches, several at a time; return whether any batch is left to deliver or may follow."""
        wanted: list[Wanted] = []
        # Each message wakes a shard, which costs more than the message itself while workers keep the processor busy.
        together = min(self._options.requested // 4, self._options.requested - self._options.ready)
        together = max(together, self._batches_together())
        most, size = self._options.requested, len(self._requested[-1].wanted) if self._requested else 0
        begins = len(self._requested) <= most - max(1, together)
        while begins and not self._exhausted and len(self._requested) < batches_ahead(size, at_most=most):
            keys = next(self._plan, None)
            if keys is None or keys is LATER:
                self._exhausted = keys is None
                break
            size = len(keys)
            batch = _Batch(self._planned, [Wanted(next(self._links.tickets), key) for key in keys])
            self._planned += 1
            self._requested.append(batch)
            wanted += batch.wanted
        if wanted:
            self._links.want(wanted)
        return bool(self._requested) or not self._exhausted

    def _fetch_ahead(self) -> None:
        """Begin to fetch the oldest batches that the budget allows, and request the other batches."""
        together = self._batches_together()
        # Two calls if a call has several batches: the shard works at one while the batches of the other are collated.
        most = max(self._options.ready, 2 * together if together > 1 else 1)
        if self._mean_bytes:
            most = max(1, min(most, int(self._options.budget_bytes / self._mean_bytes)))
        together = min(together, most)
        waiting = [*itertools.islice(self._requested, self._fetching, most)]
        if len(waiting) < together and self._fetching and not self._exhausted:
            waiting = []  # soon there are enough for a call
        for start in range(0, len(waiting), together):
            batches = waiting[start : start + together]
            values: dict[int, Received] = {}
            fetches = self._links.fetch([one for batch in batches for one in batch.wanted], self._of)
            for batch in batches:
                batch.values, batch.fetches = values, fetches
            self._fetching += len(batches)
        self._links.flush(self._of)

    def _batches_together(self) -> int:
        if not self._mean_bytes or not self._requested:  # the first batch does not wait for others
            return 1
        samples = max(1, len(self._requested[0].wanted))
        each, nbytes = samples / self._links.shards, self._mean_bytes / samples
        return batches_together(each, nbytes, self._mean_wait_s, at_most=self._options.requested // 2)

    def _complete(self, batch: _Batch) -> _Batch:
        """Wait for every sample of a batch, and fetch lost ones again."""
        began = since = time.monotonic()
        waited = False
        backoff: Backoff | None = None
        while True:
            had = len(batch.values)
            while batch.fetches and not batch.is_poisoned:
                fetch = batch.fetches.pop(0)
                while not self._links.comes(fetch, LOOK_S):
                    # The awaited sample may wait for the memory of received ones.
                    self._take_answered()
                try:
                    batch.values.update(self._links.finish(fetch))
                except DPFlowError as error:
                    if not self._closed.is_set():
                        backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                        self._mend(error, batch, since, backoff)
                        waited = True
                if self._closed.is_set():
                    raise _Closed
            missing = batch.missing
            if batch.is_poisoned:
                # The error replaces the batch, and each of its other samples could cost three more workers.
                batch.fetches = []
                self._links.release(missing, self._of)
                break
            if not missing:
                break
            if len(batch.values) > had:
                since = time.monotonic()
                backoff = None
            batch.fetches = self._links.fetch(missing, self._of)
        if waited:
            self._router.outages.on_success()
        self._requested.popleft()
        self._fetching -= 1
        came = [batch.values.get(one.ticket) for one in batch.wanted]
        batch.nbytes = sum([len(frame) for one in came if isinstance(one, tuple) for frame in one[1]])
        if self._mean_bytes:  # the first batch also waits for the workers' start
            self._mean_wait_s += (time.monotonic() - began - self._mean_wait_s) * 0.2
        self._mean_bytes += (batch.nbytes - self._mean_bytes) * (0.2 if self._mean_bytes else 1.0)
        return batch

    def _take_answered(self) -> None:
        """Take the samples of answered fetches early: shards hold the samples' memory until their release."""
        for batch in itertools.islice(self._requested, self._fetching):
            for fetch in [*batch.fetches]:
                if self._links.comes(fetch, POLL_S):
                    batch.fetches.remove(fetch)
                    with suppress(DPFlowError):  # its samples stay missing, and are fetched again
                        batch.values.update(self._links.finish(fetch))
        with suppress(DPFlowError):  # the next call carries the tickets
            self._links.release([], self._of)

    def _mend(self, error: DPFlowError, batch: _Batch, since: float, backoff: Backoff) -> None:
        """Refresh the routes or connections that the error shows to be out of date, and wait for the next attempt.

        since: time at which the last sample arrived, by `time.monotonic`.
        """
        outages, options = self._router.outages, self._options
        batch.faults += isinstance(error, RemoteCallError) and error.kind is ErrorKind.INTERNAL
        kind = outages.on_error(error, batch.faults)
        # A sample that hangs fails after POISON_LIMIT workers have tried it. Lost workers load nothing at all.
        loading_s = 0.0 if kind is ErrorKind.LOST else POISON_LIMIT * (options.task_timeout_s or 0.0)
        deadline = options.reconnect_timeout_s + min(since + loading_s, max(since, outages.answered_at))
        if time.monotonic() >= deadline:
            raise outages.deadline_error(error) from error
        match kind:
            case ErrorKind.STALE_JOB:
                self._router.rejoin(self._router.id.generation, self._closed, deadline)
                return
            case ErrorKind.STALE_ROUTING:
                known = self._router.routes.generation
                self._router.refresh_routes(self._closed, deadline)
                if self._router.routes.generation != known:
                    return
                # Another flow's shard listens at its address, and the router does not know yet.
            case None:
                self._router.refresh_routes(self._closed, deadline)  # the shard has ended or moved
        self._closed.wait(backoff.pause_s())

    def _deliver(self, batch: _Batch) -> None:
        # A reference in this frame would keep the batch's memory while the thread waits for the next one.
        came = [batch.values.pop(one.ticket, None) for one in batch.wanted]
        keys = [one.key for one in batch.wanted]
        if not self._exhausted or self._requested:
            self._request_ahead()
            self._fetch_ahead()
        if not self._requested:
            self._links.release([], self._of)
        self._samples += len(keys)
        ready = ReadyBatch(batch.number, None, keys, self._samples, nbytes=batch.nbytes)
        build_batch(ready, came, self._collate, self._router.inquiries.how_workers_ended)
        self._ready.put(ready, self._take_answered)

    def _release_all(self) -> None:
        left = [one for batch in self._requested for one in batch.wanted]
        self._requested.clear()  # a closed reader, which its job keeps, would keep the memory of what was received
        with suppress(DPFlowError):  # its lease expires anyway
            self._links.release(left, self._of)


def end_calls(thread: threading.Thread, deadline: float, links: ShardLinks) -> None:
    """Wait until a thread of a closing job ends. After `deadline` (by `time.monotonic`), interrupt the job's calls."""
    thread.join(max(0.0, deadline - time.monotonic()))
    while thread.is_alive():
        links.interrupt()
        links.router.interrupt()
        thread.join(AGAIN_S)


class _Closed(Exception):
    """Exception: the reader was closed while its thread waited."""
