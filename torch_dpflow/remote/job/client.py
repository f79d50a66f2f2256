"""What a job holds of a shared flow: `open_job` registers and joins, the job gives out its epochs."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch_dpflow.checks import check_int
from torch_dpflow.errors import (
    DeadlineError,
    DPFlowError,
    ErrorKind,
    OptionError,
    PeerLostError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.log import LOADER
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.remote.access.cluster_address import Cluster, find_cluster
from torch_dpflow.remote.job.assemble import assembler
from torch_dpflow.remote.job.epoch_cursor import Delivered
from torch_dpflow.remote.job.epoch_reader import CLOSE_S, Pipeline, SharedIterator
from torch_dpflow.remote.job.flow_registration import describe, length_of, register, source_of
from torch_dpflow.remote.job.job_description import Home, JobDescription
from torch_dpflow.remote.job.job_options import JobOptions, Replica, draw_name
from torch_dpflow.remote.job.router_link import RouterLink
from torch_dpflow.remote.job.shard_link import ShardLinks
from torch_dpflow.remote.job.stop_signal import StopSignal
from torch_dpflow.remote.observe.sharing import Sharing, sharing_of
from torch_dpflow.remote.wire.body import MAX_SAMPLES
from torch_dpflow.remote.wire.router import JobFigures, JobRank
from torch_dpflow.remote.wire.shard import POISON_LIMIT
from torch_dpflow.remote.worker.sample_source import SampleAssignment
from torch_dpflow.samplers.indices import Indices, check_indices

__all__ = ["JobOptions", "Replica", "SharedJob", "open_job"]

#: How often a job says that it lives, seconds.
BEAT_S = 2.0
#: How long a thread that has been interrupted is waited for before it is interrupted again, seconds.
JOIN_S = 0.05


def open_job(
    flow: str,
    dataset: Any,
    *,
    address: str | None = "auto",
    version: int = 1,
    batch_size: int = 1,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    indices: Indices | None = None,
    replica: Replica | None = None,
    workers: int = 2,
    worker_init_fn: Callable[[int], Any] | None = None,
    first_part: bool = False,
    options: JobOptions | None = None,
) -> SharedJob:
    """Join the jobs that read `flow`, whose services are started if they do not run.

    Args:
        flow: its name, 1 to 100 of the characters A-Z a-z 0-9 . _ / -.
        dataset: map-style, with a length. It travels to the workers by cloudpickle, once for each version. Where it is
            an `ALSDCache`, or `Parts`, the flow keeps what may be kept.
        address: of the cluster; see `find_cluster`.
        version: of the flow; raise it with every change of the dataset.
        seed: with the epoch it decides the job's own order, and what is drawn by chance for it.
        indices: the samples that the job reads; None: all.
        replica: which rank of a job of several ranks this is; all of them must give `options.name`, and the same
            `seed` and `indices`. None: it is the whole job.
        workers: (flow) processes that load.
        first_part: read what the deterministic part of a flow in two parts gives, instead of samples.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
        UsageError: the cluster refuses the flow or the job, and says why.
        NotPicklableError: the dataset cannot travel.
        DeadlineError: the cluster does not answer.
    """
    options = options or JobOptions()
    if replica is not None and replica.num_replicas > 1 and options.name is None:
        raise OptionError(
            f"replica={replica!r} without a name: the ranks of a job find each other by its name, so give all of them "
            "the same JobOptions(name=...), and no other job that one"
        )
    cluster = find_cluster(address)
    source = source_of(dataset, options)
    size = length_of(source.parts.first)
    chosen = None if indices is None else check_indices(indices, size)
    assignment = SampleAssignment(parts=source.parts, worker_init_fn=worker_init_fn)

    def register_with(cluster: Cluster, patience_s: float) -> None:
        packed = assignment.pack()
        spec = describe(
            flow, version, source, assignment, packed, size=size, workers=workers, options=options
        )
        register(cluster, spec, packed, patience_s=patience_s)

    register_with(cluster, options.patience_s)
    home = Home(find=partial(_found, address), register=register_with)
    name = options.name or draw_name()
    job = JobDescription(
        flow=flow,
        version=version,
        name=name,
        seed=seed,
        batch_size=batch_size,
        indices=chosen,
        keeps=(source.repeatable or source.staged) and options.policy != "none",
        rank=None
        if replica is None
        else JobRank(name, replica.rank, replica.num_replicas, replica.drop_last),
    )
    return SharedJob(
        cluster, job, size, drop_last, assembler(collate_fn), options, first_part=first_part, home=home
    )


class SharedJob:
    """One job that reads a flow. It has one iterator at a time: the next one ends the one before, which says so.

    Not to be used after a fork; `close` does nothing in a child, which has neither its threads nor its connections.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: JobDescription,
        size: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any],
        options: JobOptions,
        *,
        first_part: bool = False,
        home: Home | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._job = job
        self._first_part = first_part
        self._size = size
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._options = options
        self._router = RouterLink(cluster, job, patience_s=options.patience_s, home=home)
        self._links = ShardLinks(self._router)
        self._tickets = itertools.count(1)
        self._meter = LoaderMeter()
        #: The latest; what is one stays one, as any thread may close the job meanwhile.
        self._iterator: SharedIterator | None = None
        self._delivered = self._nothing_of(0)
        self._closed = StopSignal()
        #: Whether its thread says no more than that it goes.
        self._leaving = False
        self._heart = threading.Thread(target=self._live, name="dpflow-beat", daemon=True)
        self._heart.start()

    @property
    def length(self) -> int:
        """Samples of one epoch, of this rank's part of it where the job has several."""
        return self._router.length

    @property
    def seed(self) -> int:
        """What decides the job's own order."""
        return self._job.seed

    @property
    def sharing(self) -> Sharing:
        """What its flow's shards have loaded and given out, as they said last."""
        tallies = list(self._links.tallies.values())
        served, decodes = (sum(tally[place] for tally in tallies) for place in (0, 1))
        return sharing_of(served, decodes, size=self._size, keeps=self._job.keeps)

    @property
    def is_read(self) -> bool:
        """Whether an epoch has begun that is neither over nor given up."""
        return self._iterator is not None and not self._iterator.is_over

    def traverse(
        self, epoch: int, *, done: dict[str, Any] | None = None, draw_seed: int | None = None
    ) -> SharedIterator:
        """An epoch whose order the flow's router decides: each sample once, every order equally likely.

        A rank of several waits for the others before its first batch, and again where it comes back with another
        state than the others know of.

        done: what `state` said; the samples that were delivered by then are not read again.
        draw_seed: with the epoch it decides what is drawn by chance; None: the job's seed.
        Raises StateError for a state of another flow, epoch or rank.
        """
        delivered = self._nothing_of(epoch)
        if done is not None:
            delivered.resume(epoch, done)
        self._begin(delivered)
        position = delivered.position
        self._router.start_epoch(epoch, delivered.marks.copy(), position)
        closed = StopSignal()
        batches = self._drawn_batches(self.length - position, closed)
        return self._iterate(batches, epoch, draw_seed, closed)

    def read(
        self,
        plan: Iterable[Sequence[int]],
        epoch: int,
        *,
        draw_seed: int | None = None,
        passed: Callable[[int, int], None] | None = None,
    ) -> SharedIterator:
        """The batches of a plan of the caller's, in its order.

        draw_seed: as for `traverse`.
        passed: called with the number of each batch that was handed out, from 0 on, and its samples; before the next
            one is, or by the iterator's `settle`, and twice where it was interrupted.
        """
        self._begin(self._nothing_of(epoch))
        return self._iterate(map(self._checked, plan), epoch, draw_seed, StopSignal(), passed)

    def state(self) -> dict[str, Any]:
        """Where the job is: which samples of the epoch have been delivered. O(size / 8)."""
        if self._iterator is not None:
            self._iterator.settle()
        return self._delivered.state()

    def close_with(self, owner: object) -> None:
        """Have the job closed when `owner` is collected, or at the interpreter's end."""
        weakref.finalize(owner, self.abandon).atexit = False
        atexit.register(self.close)

    def abandon(self) -> None:
        """Have the job's own thread leave the flow and end; nothing is waited for, and no lock taken.

        A finalizer may call, which runs in any thread, between any two of its steps: with a lock held that leaving
        takes, or in a thread that leaving waits for.
        """
        self._closed.set()
        self._router.contact.end()
        if self._iterator is not None:
            self._iterator.abandon()

    def close(self) -> None:
        """Leave the flow; threads end. Any thread may call, again too; the job's own threads do not wait for it."""
        if os.getpid() != self._pid:
            return
        self.abandon()
        if threading.current_thread() is self._heart:
            return
        if self._iterator is not None and not self._iterator.close():
            return
        self._heart.join(0.0 if self._router.contact.is_lost else CLOSE_S)
        while self._heart.is_alive() and not self._leaving:
            self._router.interrupt()
            self._links.interrupt()
            self._heart.join(JOIN_S)
        self._heart.join()

    def __enter__(self) -> SharedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _nothing_of(self, epoch: int) -> Delivered:
        epoch = check_int("epoch", epoch, minimum=0)
        return Delivered(self._size, self._job.seed, self._job.rank, epoch)

    def _begin(self, delivered: Delivered) -> None:
        if self._closed.is_set():
            raise UsageError("the job has been closed; open another")
        if self._iterator is not None:
            self._iterator.close()
        self._delivered = delivered

    def _iterate(
        self,
        plan: Iterator[Sequence[int]],
        epoch: int,
        draw_seed: int | None,
        closed: StopSignal,
        passed: Callable[[int, int], None] | None = None,
    ) -> SharedIterator:
        options, seed = self._options, self._job.seed if draw_seed is None else draw_seed
        delivered, before = self._delivered, self._delivered.position

        def note(number: int, keys: list[int], end: int) -> None:
            delivered.add(keys, before + end)
            if passed is not None:
                passed(number, len(keys))

        self._iterator = SharedIterator(
            self._router,
            self._links,
            plan,
            epoch=epoch,
            draw=None if self._first_part else _draw_of(seed, epoch),
            tickets=self._tickets,
            assemble=self._collate_fn,
            delivered=note,
            meter=self._meter,
            pipeline=Pipeline(
                ready=options.ready,
                fetched=options.ready,
                asked=options.asked,
                budget_bytes=options.budget_bytes,
                patience_s=options.patience_s,
                # A sample that hangs is given up by its shard after several tries, and named then.
                loading_s=POISON_LIMIT * (options.task_timeout_s or 0.0),
            ),
            closed=closed,
        )
        if self._closed.is_set():
            self._iterator.close()  # whoever closed the job may have looked for it before it was there
        return self._iterator

    def _drawn_batches(self, left: int, given_up: StopSignal) -> Iterator[list[int]]:
        """Batches as the router draws them, half of what is asked ahead at a time."""
        size = self._job.batch_size
        if self._drop_last:
            left -= left % size
        waiting: list[int] = []
        ahead = max(1, self._options.asked // 2) * size
        while left:
            while len(waiting) < min(size, left):
                count = min(ahead, left - len(waiting), MAX_SAMPLES)
                waiting += self._router.draw(count, given_up).tolist()
            batch, waiting = waiting[:size], waiting[size:]
            left -= len(batch)
            yield batch

    def _checked(self, keys: Sequence[int]) -> list[int]:
        for key in keys:
            if not 0 <= key < self._size:
                raise OptionError(f"the plan has sample {key}: the flow has samples 0 to {self._size - 1}")
        return [int(key) for key in keys]

    def _live(self) -> None:
        self._beat()
        self._leaving = True
        if self._iterator is not None:
            self._iterator.close()
        self._links.close(self._router.id)
        self._router.close()
        atexit.unregister(self.close)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            generation = self._router.id.generation
            try:
                self._beat_once()
            except RemoteCallError as error:
                if error.kind is ErrorKind.STALE_JOB:
                    self._recover(partial(self._router.rejoin, generation, self._closed))
                elif error.kind in (ErrorKind.INTERNAL, ErrorKind.USAGE):
                    LOADER.warning("flow %r, job %r: %s", self._job.flow, self._job.name, error)
            except DPFlowError:
                self._recover(partial(self._router.refresh_routes, self._closed))
            except Exception:
                LOADER.exception("flow %r, job %r: its heartbeat failed", self._job.flow, self._job.name)

    def _beat_once(self) -> None:
        self._router.beat(self._figures())
        self._links.forget(self._router.id)
        self._links.beat(self._router.id)

    def _figures(self) -> JobFigures:
        meter = self._meter
        return JobFigures(meter.stall_s, meter.iterating_s, meter.batches, meter.samples, meter.bytes)

    def _recover(self, mend: Callable[[], None]) -> None:
        try:
            mend()
        except (DeadlineError, PeerLostError):
            return  # it has been said; the next beat tries again
        except DPFlowError as error:
            LOADER.warning("flow %r, job %r: %s", self._job.flow, self._job.name, error)


def _found(address: str | None) -> Cluster | None:
    """The cluster at `address`; None while there is none."""
    try:
        return find_cluster(address)
    except OptionError:
        return None


def _draw_of(seed: int, epoch: int) -> int:
    """What decides, with a sample's key, what is drawn by chance: another for each seed and epoch.

    Jobs with the same seed draw alike, as they would under torch's loader.
    """
    packed = struct.pack("<QQ", seed & (1 << 64) - 1, epoch)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"dpflow-draw").digest()
    return int.from_bytes(digest, "little") >> 1
