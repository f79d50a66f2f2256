"""What a job holds of a shared flow: `open_job` registers and joins, the job gives out its epochs."""

from __future__ import annotations

import base64
import hashlib
import itertools
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import (
    DPFlowError,
    OptionError,
    RemoteCallError,
    StateError,
    UsageError,
)
from torch_dpflow.log import LOADER
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.remote.assemble import assembler
from torch_dpflow.remote.cluster_address import Cluster, find_cluster
from torch_dpflow.remote.flow_registration import describe, length_of, register, unwrap
from torch_dpflow.remote.job_options import JobOptions
from torch_dpflow.remote.protocol import JobFigures
from torch_dpflow.remote.refusals import StaleJobError
from torch_dpflow.remote.router_link import JobDescription, RouterLink
from torch_dpflow.remote.samples import SampleAssignment
from torch_dpflow.remote.shard_link import ShardLinks
from torch_dpflow.remote.shared_iterator import Pipeline, SharedIterator
from torch_dpflow.samplers.indices import Indices, check_indices

__all__ = ["JobOptions", "SharedJob", "open_job"]

#: How often a job says that it lives, seconds.
BEAT_S = 2.0


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
    workers: int = 2,
    worker_init_fn: Callable[[int], Any] | None = None,
    options: JobOptions | None = None,
) -> SharedJob:
    """Join the jobs that read `flow`, whose services are started if they do not run.

    Args:
        flow: its name, 1 to 100 of the characters A-Z a-z 0-9 . _ / -.
        dataset: map-style, with a length. It travels to the workers by cloudpickle, once for each version.
        address: of the cluster; see `find_cluster`.
        version: of the flow; raise it with every change of the dataset.
        seed: with the epoch it decides the job's own order, and what is drawn by chance for it.
        indices: the samples that the job reads; None: all.
        workers: (flow) processes that load.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
        UsageError: the cluster refuses the flow or the job, and says why.
        NotPicklableError: the dataset cannot travel.
        DeadlineError: the cluster does not answer.
    """
    options = options or JobOptions()
    cluster = find_cluster(address)
    dataset, repeatable = unwrap(dataset, options)
    size = length_of(dataset)
    chosen = None if indices is None else check_indices(indices, size)
    assignment = SampleAssignment(dataset=dataset, worker_init_fn=worker_init_fn)
    packed = assignment.pack()
    spec = describe(
        flow,
        version,
        assignment,
        packed,
        size=size,
        repeatable=repeatable,
        workers=workers,
        options=options,
    )
    register(cluster, spec, packed, patience_s=options.patience_s)
    job = JobDescription(
        flow=flow,
        version=version,
        name=options.name or secrets.token_hex(8),
        seed=seed,
        batch_size=batch_size,
        indices=chosen,
        traverses=True,
    )
    return SharedJob(cluster, job, size, drop_last, assembler(collate_fn), options)


class SharedJob:
    """One job that reads a flow. It has one iterator at a time; the next one closes the one before.

    Not to be used after a fork.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: JobDescription,
        size: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any],
        options: JobOptions,
    ) -> None:
        self._job = job
        self._size = size
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._options = options
        self._router = RouterLink(cluster, job, patience_s=options.patience_s)
        self._stream = self._router.stream
        self._links = ShardLinks(cluster, self._router)
        self._tickets = itertools.count(1)
        self._meter = LoaderMeter()
        self._iterator: SharedIterator | None = None
        self._epoch = 0
        self._delivered = np.zeros(-(-size // 8), np.uint8)
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="dpflow-beat", daemon=True)
        self._heart.start()

    @property
    def length(self) -> int:
        """Samples of one epoch."""
        return self._router.length

    def traverse(self, epoch: int, *, done: dict[str, Any] | None = None) -> SharedIterator:
        """An epoch whose order the flow's router decides: each sample once, every order equally likely.

        done: what `state` said; the samples that were delivered by then are not read again.
        Raises StateError for a state of another flow or epoch.
        """
        drawn = self._restored(done, epoch)
        self._begin(epoch, drawn)
        if done is not None:
            self._stream = done["stream"]
        position = int(np.unpackbits(drawn).sum())
        self._router.start_epoch(epoch, drawn.copy(), position)
        return self._iterate(self._drawn_batches(self.length - position), epoch)

    def read(self, plan: Iterable[Sequence[int]], epoch: int) -> SharedIterator:
        """The batches of a plan of the caller's, in its order."""
        self._begin(epoch, np.zeros_like(self._delivered))
        return self._iterate(map(self._checked, plan), epoch)

    def state(self) -> dict[str, Any]:
        """Where the job is: which samples of the epoch have been delivered. O(size / 8).

        With it goes the job's number in the flow, so that what is drawn by chance stays as it was.
        """
        marks = base64.b64encode(self._delivered.tobytes()).decode("ascii")
        return {"epoch": self._epoch, "size": self._size, "stream": self._stream, "done": marks}

    def close(self) -> None:
        """Leave the flow; threads end. May be called twice."""
        if self._iterator is not None:
            self._iterator.close()
        self._closed.set()
        if self._heart.is_alive():
            self._heart.join()
        self._links.close(self._router.id)
        self._router.close()

    def __enter__(self) -> SharedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(self, epoch: int, delivered: npt.NDArray[np.uint8]) -> None:
        if self._closed.is_set():
            raise UsageError("the job has been closed; open another")
        if epoch < 0:
            raise OptionError(f"epoch={epoch}: must be at least 0")
        if self._iterator is not None:
            self._iterator.close()
        self._epoch, self._delivered = epoch, delivered

    def _iterate(self, plan: Iterator[Sequence[int]], epoch: int) -> SharedIterator:
        options = self._options
        self._iterator = SharedIterator(
            self._router,
            self._links,
            plan,
            epoch=epoch,
            draw=_draw_of(self._job.seed, self._stream, epoch),
            tickets=self._tickets,
            assemble=self._collate_fn,
            delivered=self._mark,
            meter=self._meter,
            pipeline=Pipeline(
                ready=options.ready,
                fetched=options.ready,
                asked=options.asked,
                budget_bytes=options.budget_bytes,
                patience_s=options.patience_s,
            ),
        )
        return self._iterator

    def _drawn_batches(self, left: int) -> Iterator[list[int]]:
        """Batches as the router draws them, half of what is asked ahead at a time."""
        size = self._job.batch_size
        if self._drop_last:
            left -= left % size
        waiting: list[int] = []
        ahead = max(1, self._options.asked // 2) * size
        while left:
            while len(waiting) < min(size, left):
                waiting += self._router.draw(min(ahead, left - len(waiting), 1 << 14)).tolist()
            batch, waiting = waiting[:size], waiting[size:]
            left -= len(batch)
            yield batch

    def _checked(self, keys: Sequence[int]) -> list[int]:
        for key in keys:
            if not 0 <= key < self._size:
                raise OptionError(f"the plan has sample {key}: the flow has samples 0 to {self._size - 1}")
        return [int(key) for key in keys]

    def _mark(self, keys: list[int]) -> None:
        marks = np.asarray(keys, np.int64)
        np.bitwise_or.at(self._delivered, marks >> 3, (128 >> (marks & 7)).astype(np.uint8))

    def _restored(self, done: dict[str, Any] | None, epoch: int) -> npt.NDArray[np.uint8]:
        if done is None:
            return np.zeros_like(self._delivered)
        try:
            if (done["epoch"], done["size"]) != (epoch, self._size):
                raise StateError(
                    f"the state is of epoch {done['epoch']!r} of {done['size']!r} samples, to be begun is epoch "
                    f"{epoch} of {self._size}; give the epoch's own state, or none"
                )
            marks = np.frombuffer(base64.b64decode(done["done"], validate=True), np.uint8)
            if not (isinstance(done["stream"], int) and 0 <= done["stream"] < 1 << 63):
                raise StateError(f"the job's state is damaged: its number is {done['stream']!r}")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the job's state is damaged: {error!r}") from error
        if len(marks) != len(self._delivered):
            raise StateError(
                f"the job's state has {len(marks)} bytes of marks; {len(self._delivered)} are right"
            )
        restored: npt.NDArray[np.uint8] = marks.copy()
        return restored

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            generation = self._router.id.generation
            try:
                self._beat_once()
            except RemoteCallError as error:
                if error.kind == StaleJobError.__name__:
                    self._recover(partial(self._router.rejoin, generation))
            except DPFlowError:
                self._recover(self._router.refresh_routes)

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
        except DPFlowError as error:
            LOADER.warning("job %s has lost touch with its flow: %s", self._job.name, error)


def _draw_of(seed: int, stream: int, epoch: int) -> int:
    """What decides, with a sample's key, what is drawn by chance: another for each job and epoch."""
    packed = struct.pack("<QQQ", seed & (1 << 64) - 1, stream, epoch)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"dpflow-draw").digest()
    return int.from_bytes(digest, "little") >> 1
