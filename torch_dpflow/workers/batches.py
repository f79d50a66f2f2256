"""Loading of batches in a worker, with the seeds, fetchers, streams and errors of torch's worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterDataPipe, graph_settings

from torch_dpflow._core.checks import working
from torch_dpflow._core.stage_clock import StageClock, timed
from torch_dpflow._core.torch_private import DatasetKind, ExceptionWrapper, generate_state, set_worker_info
from torch_dpflow.epoch.own_state import Stream, Unsaved, at_rest, ended, opened, return_dataset, sealed
from torch_dpflow.epoch.plan import samples_in
from torch_dpflow.epoch.rng import (
    begin_epoch_of_worker,
    capture_rng,
    has_drawn_since,
    restore_rng,
    seed_batch,
    seed_sample,
)
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import MessageError, NotPicklableError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.messages.headers import BATCH, END, FAILURE, UNFIT
from torch_dpflow.workers.batch_pieces import (
    BatchPiece,
    CollateAt,
    Lender,
    PieceLoader,
    loads_by_sample,
    part_of,
    position_of,
)
from torch_dpflow.workers.process_control import keep_freed_memory
from torch_dpflow.workers.script_settings import ScriptSettings
from torch_dpflow.workers.stream_items import StreamItem

#: By default, all workers of a loader together share at most 1 / SHARED_FRACTION of a machine's memory.
SHARED_FRACTION = 4


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Specification of what workers load, and how; the same for all workers of a loader and their replacements."""

    dataset: Any
    dataset_kind: int
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    batch_size: int | None
    worker_init_fn: Callable[[int], Any] | None
    num_workers: int
    base_seed: int
    #: Whether random numbers are one stream per worker, as in torch, and not seeded by batch.
    own_stream: bool
    #: Whether random numbers are seeded by sample.
    by_sample: bool = False
    #: Whether other workers may load rows of a batch.
    divides: bool = False
    read_threads: int
    #: Bytes of shared memory for each worker; None: a worker's share of its host's memory.
    shared_memory: int | None
    #: Whether a result may wait to be sent with later results; only for streams of single items.
    holds: bool = False
    #: The script's settings; None: workers are started from its process and inherit them.
    settings: ScriptSettings | None = None

    @property
    def starts_alone(self) -> bool:
        """Whether a worker runs none of the user's code before its first batch."""
        return self.worker_init_fn is None and self.settings is None and not self.own_stream


@dataclass(frozen=True, kw_only=True)
class EpochSpec:
    """The parameters of an epoch for its workers; sent pickled."""

    epoch: int
    base_seed: int
    #: For data pipes: the seed that all workers and ranks share.
    shared_seed: int | None
    #: State from which this worker's stream of batches continues; None: from its beginning.
    stream: StreamState | None
    #: Number of the epoch among the epochs of these workers.
    generation: int = 0
    #: Whether `stream` comes from a saved state, and not from the end of this worker's previous epoch.
    resumes: bool = False


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Report of a worker with a separate stream (`LoadSpec.own_stream`): it has begun an epoch, or cannot."""

    generation: int
    #: The stream's state before its first batch; None if resuming needs no state of the dataset.
    stream: StreamState | None
    #: The error because of which the epoch cannot begin, an ExceptionWrapper; None: it has begun.
    failure: Any


class LoadedBatch(NamedTuple):
    """Outcome of one task: its kind and its value."""

    #: BATCH, FAILURE, END, OPENED or UNFIT.
    kind: int
    #: By kind: batch, ExceptionWrapper, None, encoded `OpenedBatch`. For a `BatchPiece`: see `PieceLoader.load`.
    value: Any
    #: The new position of the worker's stream, if a saved state needs it.
    stream: StreamState | None


class BatchSource:
    """Loader of a worker process's batches, equivalent to the loop of torch's worker.

    Makes the process a DataLoader worker: one torch thread, torch's seeds, `get_worker_info()`.

    Args:
        clock: measures the times of loading stages.
    """

    def __init__(self, spec: LoadSpec, worker: int, clock: StageClock) -> None:
        self._load_spec = spec
        self._worker = worker
        self._clock = clock
        self._iterable = spec.dataset_kind == DatasetKind.Iterable
        self._dataset = spec.dataset
        self._epoch: EpochSpec | None = None
        self._fetcher: Any = None
        #: Loads the batch of these indices with the fetcher.
        self._fetch: Callable[[Any], Any]
        self._broken: Any = None
        self._delivered = self._failed = 0
        self._pieces: PieceLoader | None = None
        #: The position of the batch that is being loaded.
        self._position = 0
        _become_worker(spec, worker)

    def begin(self, epoch: EpochSpec) -> Begun | None:
        """Begin an epoch; return the report if this worker has a separate stream, else None.

        If an error is raised here, for example by `worker_init_fn`, it becomes the result of every task.
        """
        first = self._epoch is None
        self._epoch = epoch
        begin_epoch_of_worker(epoch.epoch)
        self._delivered, self._failed = (epoch.stream.delivered, epoch.stream.failed) if epoch.stream else (0, 0)
        self._broken = None
        try:
            epoch = self._epoch = _opened(epoch, lives_on=not first and not epoch.resumes)
            if isinstance(self._dataset, IterDataPipe):
                shared = torch.Generator()
                shared.manual_seed(epoch.shared_seed or 0)
                self._dataset = graph_settings.apply_random_seed(self._dataset, shared)
            if first and self._load_spec.worker_init_fn is not None:
                self._load_spec.worker_init_fn(self._worker)
            self._begin_stream(epoch.stream)
        except Exception:
            self._broken = wrapped_failure(self._worker)
        if not self._load_spec.own_stream:
            return None
        return Begun(generation=epoch.generation, stream=self._beginning(), failure=self._broken)

    def share(self, arena: Arena, lender: Lender, collate_at: CollateAt) -> None:
        """Let other workers load rows of slow batches, if `divides` and `loads_by_sample`; see `PieceLoader`."""
        if self._load_spec.divides and loads_by_sample(self._dataset):
            self._pieces = PieceLoader(arena, lender, self._rows, collate_at, self._clock)

    def load(self, task: int, index: Any) -> LoadedBatch:
        """Load a batch, and return it, its failure, or the end of the stream.

        index: the batch's indices, or a `BatchPiece` of an opened batch.

        Raises MessageError if no epoch has begun.
        """
        if self._broken is not None:
            return LoadedBatch(FAILURE, self._broken, None)
        if self._epoch is None:
            raise MessageError("a task came before its epoch")
        if not self._load_spec.own_stream:
            self._position = position_of(task)
            self._seed_batch()
        kind, pieces = BATCH, self._pieces
        try:
            if isinstance(index, BatchPiece):
                kind, value = (UNFIT, False) if pieces is None else pieces.load(index, self._has_drawn)
            elif pieces is not None and not part_of(task) and type(index) in (list, tuple) and len(index) > 1:
                kind, value = pieces.begin(index, self._has_drawn)
            else:
                value = self._fetch(index)
        except StopIteration:
            if self._iterable and not isinstance(index, BatchPiece):
                # The next epoch continues from this state.
                kept = sealed(self._dataset, ended(self._fetcher.state()))
                stream = StreamState(delivered=self._delivered, ended=True, dataset=kept, rng=capture_rng())
                return LoadedBatch(END, None, stream)
            return LoadedBatch(FAILURE, wrapped_failure(self._worker), self._stream_state(failed=1))
        except Exception:
            caught = wrapped_failure(self._worker, dataset=self._dataset, index=getattr(index, "indices", index))
            return LoadedBatch(FAILURE, caught, self._stream_state(failed=1))
        return LoadedBatch(kind, value, self._stream_state())

    def _seed_batch(self) -> None:
        assert self._epoch is not None
        seed_batch(self._epoch.base_seed, self._epoch.epoch, self._position)

    def _has_drawn(self) -> bool:
        """Return whether loading has drawn random numbers since the generators were seeded for the whole batch."""
        return not self._load_spec.by_sample and has_drawn_since(self._seed_batch)

    def _rows(self, indices: Sequence[Any], first: int) -> list[Any]:
        """Load samples one by one, as torch's fetchers do. first: the batch row of the first of `indices`."""
        dataset, epoch, by_sample = self._dataset, self._epoch, self._load_spec.by_sample
        assert epoch is not None

        def load(numbers: Any) -> list[Any]:
            if not by_sample:
                return [dataset[index] for index in numbers]
            samples = []
            for row, index in enumerate(numbers, first):
                seed_sample(epoch.base_seed, epoch.epoch, self._position, row)
                samples.append(dataset[index])
            return samples

        samples: list[Any] = self._clock.fetch(load, indices, one_by_one=True, samples=len(indices))
        return samples

    def _begin_stream(self, stream: StreamState | None) -> None:
        """Make the fetcher, at the stream's position, and restore the random generators to their states there.

        If the fetcher skips samples to reach the position, the generators are restored first, because skipping draws
        from them. Otherwise they are restored afterwards, because making the fetcher must not advance them.
        """
        passes_over = self._iterable and (stream is None or stream.dataset is None)
        rng = None if stream is None else stream.rng
        if rng is not None and passes_over:
            restore_rng(rng)
        self._fetcher = self._make_fetcher(stream)
        if rng is not None and not passes_over:
            restore_rng(rng)
        self._fetch = self._make_fetch()

    def _make_fetch(self) -> Callable[[Any], Any]:
        """Return the function that loads the batch of given indices: by default torch's fetcher."""
        spec, dataset = self._load_spec, None if self._iterable else self._dataset
        if dataset is not None and spec.auto_collation:
            collate = self._clock.collating(spec.collate_fn)
            if spec.read_threads > 1 and not callable(working(dataset, "__getitems__")):
                return threaded_fetch(dataset, collate, spec.read_threads, self._clock)
            if spec.by_sample and loads_by_sample(dataset):
                return partial(self._fetch_by_sample, collate)
        return timed_fetch(self._clock, self._fetcher, dataset, batched=spec.auto_collation)

    def _fetch_by_sample(self, collate: Callable[[Any], Any], index: Any) -> Any:
        samples = self._rows(index, 0)
        self._seed_batch()  # for `collate`
        return collate(samples)

    def _make_fetcher(self, stream: StreamState | None) -> Any:
        spec = self._load_spec
        kept = stream.dataset if stream is not None else None
        over = stream is not None and (stream.ended or not stream.delivered)
        if kept is not None and (not self._iterable or (over and kept["ended"])):
            return_dataset(self._dataset, kept)
            kept = None
        if not self._iterable:
            return self._torch_fetcher()
        if stream is not None and stream.ended:  # nothing is requested until the next epoch
            return None
        return Stream(
            self._dataset,
            self._torch_fetcher,
            state=kept,
            skip=stream.delivered if stream is not None else 0,
            failed=stream.failed if stream is not None else 0,
            batch_size=spec.batch_size if spec.auto_collation else None,
        )

    def _torch_fetcher(self) -> Any:
        spec = self._load_spec
        return DatasetKind.create_fetcher(
            spec.dataset_kind,
            self._dataset,
            spec.auto_collation,
            self._clock.collating(spec.collate_fn),
            spec.drop_last,
        )

    def _kept(self) -> Any:
        return sealed(self._dataset, self._fetcher.state() if self._iterable else at_rest(self._dataset))

    def _beginning(self) -> StreamState | None:
        """Return the stream's state before its first batch; None if resuming needs no state of the dataset."""
        assert self._epoch is not None
        over = self._epoch.stream is not None and self._epoch.stream.ended
        kept = None if over or self._broken is not None else self._kept()
        if kept is None or isinstance(kept, Unsaved):  # it starts from its beginning again
            return None
        return StreamState(delivered=self._delivered, dataset=kept, rng=capture_rng())

    def _stream_state(self, failed: int = 0) -> StreamState | None:
        self._delivered, self._failed = self._delivered + 1, self._failed + failed
        if not self._load_spec.own_stream:
            return None
        kept, rng = self._kept(), None
        if not self._iterable or (kept is not None and not isinstance(kept, Unsaved)):
            rng = capture_rng()
        elif self._epoch is not None and self._epoch.stream is not None:
            # Resuming skips the stream's beginning, which draws the same numbers from the generators again.
            rng = self._epoch.stream.rng
        return StreamState(delivered=self._delivered, failed=self._failed, dataset=kept, rng=rng)


def _opened(epoch: EpochSpec, *, lives_on: bool) -> EpochSpec:
    """Return `epoch` with the dataset's state unpickled; without it, if the dataset is not to load a state.

    The dataset loads none if its `state_dict` failed, or if it is in this state already.

    lives_on: whether the dataset continues from the epoch before, in the same worker.
    """
    if epoch.stream is None:
        return epoch
    kept = epoch.stream.dataset
    nothing = lives_on or isinstance(kept, Unsaved)
    return replace(epoch, stream=replace(epoch.stream, dataset=None if nothing else opened(kept)))


def _become_worker(spec: LoadSpec, worker: int) -> None:
    torch.set_num_threads(1)
    if spec.settings is not None:
        spec.settings.apply()
    keep_freed_memory()
    seed = spec.base_seed + worker
    random.seed(seed)
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:  # also of accelerators, for which it reads the source of each caller: 3 ms
        torch.manual_seed(seed)
    np.random.seed(generate_state(spec.base_seed, worker))
    set_worker_info(worker=worker, workers=spec.num_workers, seed=seed, dataset=spec.dataset)


def threaded_fetch(
    dataset: Any, collate_fn: Callable[[Any], Any], threads: int, clock: StageClock
) -> Callable[[Any], Any]:
    """Return a function that loads the batch of given indices in several threads, so that their waits overlap."""
    # numpy's error settings belong to a thread; these threads take over those of the worker.
    settings = partial(np.seterr, **np.geterr())
    pool = ThreadPoolExecutor(threads, thread_name_prefix="dpflow-read", initializer=settings)

    def fetch(index: Any) -> Any:
        samples = []
        for sample, *times in pool.map(partial(timed, dataset.__getitem__), index):
            samples.append(sample)
            clock.add_sample(*times)
        return collate_fn(samples)

    return fetch


def timed_fetch(clock: StageClock, fetcher: Any, dataset: Any, *, batched: bool) -> Callable[[Any], Any]:
    """Return the `fetch` method of torch's fetcher, wrapped so that `clock` measures it.

    dataset: the fetcher's map-style dataset; None if it is iterable. batched: whether the fetcher collates samples.
    """
    one_by_one, is_whole = batched and not getattr(dataset, "__getitems__", None), dataset is not None

    def fetch(index: Any) -> Any:
        samples = samples_in(index) if batched else 1
        return clock.fetch(fetcher.fetch, index, one_by_one=one_by_one, samples=samples, is_whole=is_whole)

    return fetch


def wrapped_failure(worker: int, *, dataset: Any = None, index: Any = None) -> ExceptionWrapper:
    """Wrap the exception that is being handled, with this worker's traceback, for the loader to raise.

    The message names an index beyond the dataset's length, or the number of a stream's item.
    """
    wrapper = ExceptionWrapper(where=_where(worker, index))
    if not _can_be_raised(wrapper.exc_type):
        wrapper.exc_type = RuntimeError
    if dataset is not None and issubclass(wrapper.exc_type, IndexError | KeyError):
        wrapper.exc_msg += _length_hint(dataset, index)
    return wrapper


def _can_be_raised(kind: Any) -> bool:
    """Return whether `ExceptionWrapper.reraise` can construct this type: it passes `message=` if the type has one."""
    if getattr(kind, "message", None):
        try:
            kind(message="")
        except Exception:
            return False
    return True


def unpicklable_failure(worker: int, error: NotPicklableError, index: Any = None) -> ExceptionWrapper:
    """Wrap the error of a batch that was loaded but cannot be pickled, for the loader to raise."""
    return ExceptionWrapper((type(error), error, error.__traceback__), _where(worker, index))


def _where(worker: int, index: Any) -> str:
    place = f"at {index!r}, in worker process" if isinstance(index, StreamItem) else "in DataLoader worker process"
    return f"{place} {worker}"


def _length_hint(dataset: Any, index: Any) -> str:
    try:
        length = len(dataset)
        beyond = [i for i in (index if isinstance(index, list) else [index]) if not -length <= i < length]
    except Exception:
        return ""
    if not beyond:
        return ""
    return (
        f"\nThe batch needs index {beyond[0]}, but the dataset's length is {length} in this worker. The sampler "
        "was made for another length: make the sampler and the loader again after a change of the dataset, and let "
        "__len__ give the same number in every process.\n"
    )
