"""An iteration over a flow that several jobs share: the services load, this process puts batches together."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, RandomSampler, _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torch_dpflow.errors import OptionError, StateError
from torch_dpflow.opening import LoaderView, begin, length_of, made_of
from torch_dpflow.pinning import Pin
from torch_dpflow.plan import generator_state
from torch_dpflow.progress import OPENING_ALONE, Progress, Run
from torch_dpflow.rng import restore_generator
from torch_dpflow.state import LoaderState

if TYPE_CHECKING:
    from torch_dpflow.remote.client import SharedJob
    from torch_dpflow.remote.shared_iterator import SharedIterator

_FLOW = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._/-]{0,99})(:v(?P<version>[1-9][0-9]{0,8}))?")


def flow_version(flow: str) -> tuple[str, int]:
    """The name and the version in "name" (version 1) or "name:v3".

    Raises:
        OptionError: it is neither.
    """
    parts = _FLOW.fullmatch(flow) if isinstance(flow, str) else None
    if parts is None:
        raise OptionError(
            f"flow={flow!r}: give a name of 1 to 100 of the characters A-Z a-z 0-9 . _ / -, a letter or "
            "digit first, and after it ':v' and a number where the dataset has changed, as in 'imagenet/train:v2'"
        )
    return parts["name"], int(parts["version"] or 1)


class SharedLoaderIterator(_BaseDataLoaderIter):
    """One epoch of a job that shares its flow with others.

    With `shuffle=True` the flow's router decides the order, together with those of the other jobs: every order is
    equally likely, and each sample comes once. With any other sampler its order is kept.

    Args:
        loader: a `DPFlowDataLoader` with a `flow`.
    """

    def __init__(self, loader: Any) -> None:
        self._run: Run = loader._run
        self._progress: Progress | Traversal
        self._position = 0
        epoch, pending, progress = self._run.epoch, self._run.pending, self._run.progress
        try:
            self._batches = (
                self._begin_traversal(loader) if _is_shuffled(loader) else self._begin_plan(loader)
            )
        except StateError:
            self._run.epoch = epoch
            raise
        except BaseException:
            self._run.epoch, self._run.pending, self._run.progress = epoch, pending, progress
            raise
        self._pin = Pin(self._pin_memory_device) if self._pin_memory else None
        self._run.meter.begin_epoch()

    def _begin_traversal(self, loader: Any) -> SharedIterator:
        state = self._run.take_pending()
        if state is not None and not state.fresh and state.shared is None:
            raise StateError(
                "the state was taken with another sampler or without a flow; resume as it was taken, or begin the "
                "epoch afresh"
            )
        if state is None or state.base_seed is None:
            super().__init__(loader)
        else:
            view: Any = LoaderView(loader)
            super().__init__(view)
            self._index_sampler = loader._index_sampler
            self._base_seed = state.base_seed
            if state.generator is not None and loader.generator is not None:
                restore_generator(loader.generator, state.generator)
        job = job_of(loader, int(self._base_seed))
        epoch, self._run.epoch = self._run.epoch, self._run.epoch + 1
        traversal = Traversal(job, loader, epoch, int(self._base_seed))
        batches = job.traverse(epoch, done=state.shared if state is not None else None)
        self._run.progress = self._progress = traversal
        return batches

    def _begin_plan(self, loader: Any) -> SharedIterator:
        progress = begin(self, loader, OPENING_ALONE, super().__init__)
        self._progress = progress
        self._position = progress.position
        job = job_of(loader, int(self._base_seed))

        def plan() -> Iterator[list[int]]:
            while True:
                try:
                    _, index = progress.plan.draw()
                except StopIteration:
                    return
                yield index if self._auto_collation else [index]

        return job.read(plan(), progress.epoch)

    def _next_data(self) -> Any:
        with self._run.meter.waiting():
            try:
                batch = next(self._batches)
            except StopIteration:
                self._progress.finished = True
                raise
            except Exception:
                self._pass()
                raise
            self._pass()
        self._run.meter.delivered(self._samples, 0)
        return batch if self._pin is None else self._pin(batch)

    def _pass(self) -> None:
        """Note that the batch whose turn it was has been handed out, or its error."""
        self._samples = self._batches.latest_samples
        self._progress.passed(self._position, self._samples)
        self._position += 1


class Traversal:
    """The progress of an epoch whose order the router decides: the job knows what it has delivered."""

    def __init__(self, job: SharedJob, loader: Any, epoch: int, base_seed: int) -> None:
        self._job = job
        self._generator = loader.generator
        self._length = length_of(loader)
        self._made_of = made_of(loader)
        self._base_seed = base_seed
        self.epoch = epoch
        self.finished = False

    def passed(self, position: int, samples: int) -> None:
        """The job has noted it."""

    def state(self) -> LoaderState:
        """From what the rest of the epoch, or the next one, can be had. Takes a bit for each sample of the flow."""
        return LoaderState(
            epoch=self.epoch + self.finished,
            fresh=self.finished,
            base_seed=self._base_seed,
            generator=generator_state(self._generator),
            length=self._length,
            made_of=self._made_of,
            shared=None if self.finished else self._job.state(),
        )


def job_of(loader: Any, seed: int) -> SharedJob:
    """The loader's job, opened at its first iteration and closed with the loader.

    Raises:
        as `torch_dpflow.remote.client.open_job`.
    """
    run: Run = loader._run
    if run.job is None:
        # Here, so that who shares nothing does not load the services' client.
        from torch_dpflow.remote.client import open_job

        name, version = flow_version(loader.flow)
        run.job = open_job(
            name,
            loader.dataset,
            address=loader.address,
            version=version,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            collate_fn=_assembling(loader),
            seed=seed,
            workers=max(1, int(loader.num_workers)),
            worker_init_fn=loader.worker_init_fn,
            options=loader.job,
        )
        weakref.finalize(run, run.job.close)
    return run.job


def _assembling(loader: Any) -> Callable[[list[Any]], Any]:
    collate: Callable[[Any], Any] = loader.collate_fn
    if loader._auto_collation:
        return collate
    return lambda samples: collate(samples[0])


def _is_shuffled(loader: Any) -> bool:
    """Whether the sampler is the one that torch makes for `shuffle=True`, which the router can stand in for."""
    batches, sampler = loader.batch_sampler, loader.sampler
    return (
        type(batches) is BatchSampler
        and batches.sampler is sampler
        and type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.data_source is loader.dataset
        and sampler.num_samples == len(loader.dataset)
    )


def check_shareable(loader: Any) -> None:
    """Raise OptionError for what a shared flow cannot have."""
    flow_version(loader.flow)
    if loader._dataset_kind == _DatasetKind.Iterable:
        raise OptionError(
            "flow= is for map-style datasets, whose samples have numbers; leave it out for an IterableDataset"
        )
    if loader.timeout:
        raise OptionError(
            f"timeout={loader.timeout} is not for shared flows; give job=JobOptions(patience_s=...)"
        )
