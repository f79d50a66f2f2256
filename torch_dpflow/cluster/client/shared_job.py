"""Job that reads a shared flow: creates readers of epochs, and renews the job's leases in a thread."""

from __future__ import annotations

import atexit
import hashlib
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, cast

from torch_dpflow._core import clocks
from torch_dpflow._core.checks import as_integer, check_int
from torch_dpflow._core.stage_times import StageTimes, total_of
from torch_dpflow._core.threads import PeriodicCall, StopSignal
from torch_dpflow.cluster.client.collate import LATER, PlanFeed, collate_function
from torch_dpflow.cluster.client.epoch_cursor import EpochCursor
from torch_dpflow.cluster.client.epoch_reader import CLOSE_S, EpochReader, end_calls
from torch_dpflow.cluster.client.flow_registration import FlowContent
from torch_dpflow.cluster.client.options import Failover, JobDescription, JobOptions
from torch_dpflow.cluster.client.router_link import RouterLink
from torch_dpflow.cluster.client.shard_link import EpochDraw, ShardLinks
from torch_dpflow.cluster.messages.coordinator import Cost
from torch_dpflow.cluster.messages.router import JobFigures
from torch_dpflow.cluster.monitoring.cluster_figures import Sharing, sharing_of
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import (
    DeadlineError,
    DPFlowError,
    ErrorKind,
    OptionError,
    OptionTypeError,
    PeerLostError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.ipc.messages.fields import MAX_SAMPLES
from torch_dpflow.log import LOADER
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.samplers.indices import IndexArray

#: Interval at which a job sends heartbeats (seconds).
HEARTBEAT_S = 2 * clocks.HEARTBEAT_S


class SharedJob:
    """Job that reads a flow, opened by `open_job`. It has one epoch reader at a time: a new reader closes the earlier.

    Do not use the job in a forked child, which lacks the job's threads and connections; `close` does nothing there.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: JobDescription,
        collate: Callable[[list[Any]], Any] | None,
        options: JobOptions,
        failover: Failover | None = None,
        *,
        content: FlowContent | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._job = job
        self.collate_with(collate)
        #: Content of the flow when the job was opened; None: not known.
        self.content = content
        self._options = options
        self._closed = StopSignal()
        self._router = RouterLink(
            cluster, job, reconnect_timeout_s=options.reconnect_timeout_s, failover=failover, closed=self._closed
        )
        self._links = ShardLinks(self._router)
        self._meter = LoaderMeter()
        #: The latest reader; never reset to None, as another thread may close the job meanwhile.
        self._reader: EpochReader | None = None
        self._cursor = self._cursor_at_start(0)
        #: Whether the heartbeat's thread has sent its last heartbeat, and leaves the flow.
        self._leaving = False
        self._heartbeat = PeriodicCall(
            self._send_heartbeat, HEARTBEAT_S, "dpflow-heartbeat", on_error=self._on_error, finish=self._leave
        )
        self._heartbeat.start()

    def collate_with(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        """Set the collate function of epochs that begin later; None: torch's default."""
        self._collate = collate_function(collate_fn)

    @property
    def name(self) -> str:
        """The job's name, the same for all its ranks."""
        return self._job.name

    @property
    def replicas(self) -> int:
        return 1 if self._job.rank is None else self._job.rank.replicas

    @property
    def is_closed(self) -> bool:
        """Whether the job has left the flow, or is about to leave."""
        return self._closed.is_set()

    @property
    def length(self) -> int:
        """Number of samples in an epoch; for a job with several ranks, in this rank's part."""
        return self._router.length

    @property
    def seed(self) -> int:
        return self._job.seed

    @property
    def sharing(self) -> Sharing:
        """Figures that show how far the flow's jobs share loads, from the latest answers of the shards."""
        tallies = list(self._links.tallies.values())
        served, decodes = (sum(tally[place] for tally in tallies) for place in (0, 1))
        return sharing_of(served, decodes, size=self._job.size, keeps=self._job.caches, jobs=self._router.jobs)

    @property
    def times(self) -> StageTimes:
        """Time that the flow's workers have taken to load, by stage, as the shards last reported."""
        return total_of(list(self._links.times.values()))

    @property
    def limited_by(self) -> str:
        """Name of what limits the speed of the flow's jobs, such as "storage"; empty if not known."""
        return self._router.limited_by

    def cost(self) -> Cost:
        """Return the latest known worker-seconds of the flow and of this job, requested at most once a second."""
        inquiries = self._router.inquiries
        return inquiries.cost if self._leaving else inquiries.look_at_cost()

    @property
    def is_read(self) -> bool:
        """Whether an epoch is being read: it has begun, and is neither complete nor closed."""
        return self._reader is not None and not self._reader.is_over

    def traverse(self, epoch: int, *, done: dict[str, Any] | None = None, draw_seed: int | None = None) -> EpochReader:
        """Return a reader of an epoch, in the order that the router draws.

        If the job has several ranks, the reader may wait, without a time limit, until all other ranks have begun to
        read: for example after a rank has resumed from a state.

        done: result of `state` in a run with any number of ranks, or of `join_flow_states`; the reader leaves out the
            samples that were read. None: read the whole epoch.
        draw_seed: together with the epoch, the seed of the random draws; None: the job's seed.

        Raises StateError if the epoch cannot be resumed from `done`, UsageError if the job is closed, among others.
        """
        cursor = self._cursor_at_start(epoch)
        if done is not None:
            cursor.resume(epoch, done)
        self._begin(cursor)
        self._router.start_epoch(cursor, resumes=done is not None)
        closed = StopSignal()
        batches = self._drawn_batches(cursor.left, closed)
        return self._read(batches, epoch, draw_seed, closed)

    def read(
        self,
        plan: Iterable[Iterable[int]] | PlanFeed,
        epoch: int,
        *,
        order: IndexArray | None = None,
        draw_seed: int | None = None,
        passed: Callable[[int, int], None] | None = None,
    ) -> EpochReader:
        """Return a reader that delivers the batches of `plan`, in the plan's order.

        plan: the sample numbers of each batch. If the dataset is a `Subset`, they are positions in the `Subset`.
        order: the samples of all batches, numbered as in `plan`; None if they are not known yet. The policies of the
            shards' caches use it.
        draw_seed: with `epoch`, the seed of the random draws; None: the job's seed.
        passed: called as `passed(batch, samples)` for each delivered batch: the batch's number, starting at 0, and how
            many samples it has. The call comes late, when the reader is used next. After an interrupt, it may come
            twice for one batch.
        """
        self._begin(self._cursor_at_start(epoch))
        if order is not None and len(order) and order.min() >= 0 and order.max() < self._samples:
            self._router.announce(epoch, order if self._job.places is None else self._job.places[order])
        await_plan = plan.wait if isinstance(plan, PlanFeed) else None
        return self._read(map(self._checked, plan), epoch, draw_seed, StopSignal(), passed, await_plan)

    def state(self) -> dict[str, Any]:
        """Return the state of the present epoch: which samples have been delivered.

        If the job has several ranks, the state also has the samples that all ranks together have read when each has
        read as many as this rank. With them, the state of one rank is enough to resume with a different number of
        ranks, if all ranks had read the same number. A warning is logged if the router does not report them.
        """
        if self._reader is not None:
            self._reader.note_delivered()
        self._note_together()
        self._cursor.in_order = max(self._cursor.in_order, self._router.in_order)
        return self._cursor.state()

    def close_with(self, owner: object) -> None:
        """Make the job leave its flow when `owner` is garbage-collected, or when the interpreter exits."""
        weakref.finalize(owner, self.abandon).atexit = False
        atexit.register(self.close)

    def abandon(self) -> None:
        """Close the job without waiting: its heartbeat thread leaves the flow. Takes no lock, for use in finalizers."""
        self._closed.set()
        self._heartbeat.stop()
        self._router.outages.muted = True
        if self._reader is not None:
            self._reader.abandon()

    def close(self) -> None:
        """Leave the flow, and wait until the job's threads have ended. Any thread may call, repeatedly.

        A call by one of these threads does not wait.
        """
        if os.getpid() != self._pid:
            return
        self.abandon()
        if threading.current_thread() is self._heartbeat:
            return
        deadline = time.monotonic() + (0.0 if self._router.outages.is_out else CLOSE_S)
        if self._reader is not None and not self._reader.close(deadline):
            return
        end_calls(self._heartbeat, deadline, self._links)

    def __enter__(self) -> SharedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note_together(self) -> None:
        """Request the samples that all ranks have read at this rank's position, unless the cursor has them."""
        cursor = self._cursor
        if cursor.knows_all_ranks or self._closed.is_set() or os.getpid() != self._pid:
            return
        marks = self._router.read_by_all(cursor.epoch, cursor.position)
        if marks is None:
            text = (
                "flow %r, job %r: the router does not know what all ranks have read by now; with a different number of "
                "ranks, this state resumes together with those of all ranks only"
            )
            LOADER.warning(text, self._job.flow, self._job.name)
        else:
            cursor.together = cursor.position, marks

    # -- reading ---------------------------------------------------------------------------------------------

    def _cursor_at_start(self, epoch: int) -> EpochCursor:
        epoch = check_int("epoch", epoch, minimum=0)
        return EpochCursor(self._job, epoch)

    def _begin(self, cursor: EpochCursor) -> None:
        if self._closed.is_set():
            raise UsageError("the job has been closed; open another")
        if self._reader is not None:
            self._reader.close()
        self._cursor = cursor

    def _read(
        self,
        plan: Iterator[Sequence[int]],
        epoch: int,
        draw_seed: int | None,
        closed: StopSignal,
        passed: Callable[[int, int], None] | None = None,
        await_plan: Callable[[float], object] | None = None,
    ) -> EpochReader:
        seed = self._job.seed if draw_seed is None else draw_seed
        cursor, before = self._cursor, self._cursor.position

        def note(number: int, keys: list[int], end: int) -> None:
            cursor.add(keys, before + end)
            if passed is not None:
                passed(number, len(keys))

        self._reader = EpochReader(
            self._links,
            plan,
            EpochDraw(epoch, None if self._job.cacheable_only else _draw_of(seed, epoch)),
            collate=self._collate,
            delivered=note,
            meter=self._meter,
            options=self._options,
            closed=closed,
            await_plan=await_plan,
        )
        if self._closed.is_set():
            self._reader.close()  # another thread may have closed the job before the reader was there to be closed
        return self._reader

    def _drawn_batches(self, left: int, given_up: StopSignal) -> Iterator[list[int]]:
        """Yield batches that the router draws.

        Each call of the router draws half of the batches that are requested ahead.
        """
        size = self._job.batch_size
        waiting: list[int] = []
        ahead = max(1, self._options.requested // 2) * size
        while left:
            while len(waiting) < min(size, left):
                count = min(ahead, left - len(waiting), MAX_SAMPLES)
                waiting += self._router.draw(count, given_up).tolist()
            batch, waiting = waiting[:size], waiting[size:]
            left -= len(batch)
            yield batch

    def _checked(self, keys: Iterable[int]) -> list[int]:
        if keys is LATER:
            return cast(list[int], LATER)
        numbers, places = [_sample_number(key, self._samples) for key in keys], self._job.places
        return numbers if places is None else places[numbers].tolist()

    @property
    def _samples(self) -> int:
        """Number of samples in the job's dataset, which may be a part of the flow's dataset."""
        return self._job.size if self._job.places is None else len(self._job.places)

    # -- the heartbeat's thread ------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._leaving = True
        if self._reader is not None:
            self._reader.close()
        self._links.close(self._router.id)
        cost = self._router.inquiries.look_at_cost(every_s=0.0)
        if cost.flow_s:
            text = "flow %r, job %r has ended: %.1f worker-seconds, of %.1f that the flow's workers have taken"
            LOADER.info(text, self._job.flow, self._job.name, cost.job_s, cost.flow_s)
        self._router.close()
        atexit.unregister(self.close)

    def _send_heartbeat(self) -> None:
        generation = self._router.id.generation
        reads = self._reader is not None and self._reader.is_fetching
        try:
            self._router.send_heartbeat(self._figures(), reads=reads)
            self._links.forget(self._router.id)
            self._links.send_heartbeat(self._router.id)
        except RemoteCallError as error:
            if error.kind is ErrorKind.STALE_JOB:
                self._router.rejoin(generation, self._closed)
            elif error.kind in (ErrorKind.INTERNAL, ErrorKind.USAGE):
                raise
        except DPFlowError:
            # Between two epochs the flow may have been stopped for another one; locating its router would start it.
            # In a cluster that has replaced this one, other ranks may wait for this rank's position.
            if reads or (self.replicas > 1 and self._router.is_replaced):
                self._router.refresh_routes(self._closed)

    def _figures(self) -> JobFigures:
        meter = self._meter
        # The stall first: a wait that ends in between is missing now, and would otherwise be counted twice.
        stall_s, reading_s = meter.stall_s, meter.iterating_s
        waiting_s = meter.waiting_s()
        return JobFigures(stall_s + waiting_s, reading_s + waiting_s, meter.batches, meter.samples, meter.bytes)

    def _on_error(self, error: Exception) -> None:
        # An outage is in the log already, and a call that `close` ends is not a failure.
        if not (self._closed.is_set() or isinstance(error, DeadlineError | PeerLostError)):
            trace = None if isinstance(error, DPFlowError) else error
            text = "flow %r, job %r: heartbeat failed (%s)"
            LOADER.warning(text, self._job.flow, self._job.name, error, exc_info=trace)


def _sample_number(key: Any, size: int) -> int:
    """Convert a sampler's key to an int: an integer of numpy, or a tensor with one integer, is allowed too."""
    try:
        number = as_integer(key)  # a bool is a mask's, and not sample 0 or 1
    except TypeError:
        raise OptionTypeError(
            f"the sampler returned the key {key!r:.80} of type {type(key).__name__}: the samples of a flow have "
            f"numbers, 0 to {size - 1}; make the sampler return integers, and the dataset look its keys up by number"
        ) from None
    if not 0 <= number < size:
        raise OptionError(f"the plan has sample {number}: the flow has samples 0 to {size - 1}")
    return number


def _draw_of(seed: int, epoch: int) -> int:
    """Return a number that, together with a sample's key, seeds its random draws; it differs by seed and epoch.

    Jobs with the same seed get the same draws, as with torch's loader.
    """
    packed = struct.pack("<QQ", seed & (1 << 64) - 1, epoch)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"dpflow-draw").digest()
    return int.from_bytes(digest, "little") >> 1
