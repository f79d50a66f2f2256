"""Jobs of a loader that reads a shared flow, and the decision whether the flow's router or the sampler sets the order.

If the router sets the order, a job can read samples that other jobs have just loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler

from torch_dpflow._core.ranks import process_ranks, ranks_of
from torch_dpflow._core.torch_private import default_store
from torch_dpflow.cluster.client.epoch_cursor import EpochCursor
from torch_dpflow.cluster.client.flow_registration import unwrapped
from torch_dpflow.cluster.client.open_job import FlowDefinition, JobReading, changes_of_flow, open_job
from torch_dpflow.cluster.client.options import MAX_NAME, JobDescription, JobOptions, Replica, draw_name
from torch_dpflow.cluster.messages.router import JobRank
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.ipc.messages.content_parts import describe_differences, ignoring
from torch_dpflow.loader.arguments import flow_version
from torch_dpflow.log import LOADER
from torch_dpflow.remote.shipping.content_identity import script_name
from torch_dpflow.samplers import DynaGCSSampler
from torch_dpflow.samplers.indices import IndexArray, check_indices

if TYPE_CHECKING:
    from torch_dpflow.cluster.client.shared_job import SharedJob
    from torch_dpflow.loader.runtime import LoaderRuntime

#: Counts the jobs of each flow in this process: ranks open them in the same order, because they run the same script.
_opened: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
#: The store that carries the names of those jobs: another process group counts from 0.
_counted_by: Any = None


#: By job of this process, its flow, address and rank, and the process group in which it was opened.
_readers: weakref.WeakKeyDictionary[SharedJob, tuple[Any, ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class RoutedOrder:
    """Description of an order that the flow's router draws: each sample of the sampler once, all orders equally likely.

    If a flow has a single job, this order equals that of torch's DistributedSampler with the same seed.
    """

    sampler: Any
    #: The seed of the order, together with the epoch; None: the loader's base seed.
    seed: int | None = None
    #: The samples to read; None: all samples of the dataset.
    indices: IndexArray | None = None
    #: The part of these samples that this process reads; None: all.
    replica: Replica | None = None
    #: Whether the epoch is the sampler's; otherwise the loader counts its iterations.
    counts: bool = False
    #: Whether each iteration increases the sampler's epoch, without a call of `set_epoch` by the script.
    advances: bool = False
    #: As in `DynaGCSSampler`.
    independence: float = 0.0

    def next_epoch(self, iterations: int, resumed: int | None, *, resumes: bool) -> int:
        """Return the number of the epoch that the next iteration reads; set the sampler's epoch, if it has one.

        Args:
            iterations: number of the loader's iteration, from 0.
            resumed: the epoch in a loaded state; None without a state.
            resumes: whether the state was taken in the middle of the epoch `resumed`.
        """
        if not self.counts:
            return iterations if resumed is None else resumed
        if resumed is not None and (resumes or (self.advances and not self.sampler.epoch)):
            self.sampler.set_epoch(resumed)
        epoch = int(self.sampler.epoch)
        if self.advances:
            self.sampler.set_epoch(epoch + 1)
        return epoch


def routed_order(loader: Any) -> RoutedOrder | None:
    """Return the order by which the router replaces the loader's sampler; None if the sampler's order is kept.

    The router can replace the sampler of `shuffle=True`, a SubsetRandomSampler, and a DistributedSampler or
    DynaGCSSampler that shuffles, but no subclass of them. If there are several ranks, they must have a common name:
    that of `JobOptions`, or one drawn through torch.distributed.

    Among others, a sampler is kept if its batches are not torch's, if the user has fixed its order by a separate
    generator, or if torch.distributed has more processes than it has replicas: some processes then read the same
    batches by the sampler's seed, as tensor-parallel and context-parallel peers do.
    """
    size, sampler, batches = len(loader.dataset), loader.sampler, loader.batch_sampler
    kind: Any = type(sampler)
    if type(batches) is not BatchSampler or id(batches.sampler) != id(sampler):
        return None
    if process_ranks().num_replicas > getattr(sampler, "num_replicas", 1):
        return None
    if kind is RandomSampler:
        is_plain = not sampler.replacement and sampler.num_samples == size and sampler.generator is loader.generator
        return RoutedOrder(sampler) if is_plain and sampler.data_source is loader.dataset else None
    if kind is DistributedSampler:
        if not sampler.shuffle or len(sampler.dataset) != size:
            return None
        order = RoutedOrder(sampler, sampler.seed, None, _replica_of(sampler), counts=True)
    elif kind is SubsetRandomSampler:
        if sampler.generator is not None and sampler.generator is not loader.generator:
            return None
        try:
            return RoutedOrder(sampler, indices=check_indices(sampler.indices, size))
        except (OptionError, TypeError):
            return None
    elif kind is DynaGCSSampler:
        if not sampler.shuffle or sampler.group is not None or (sampler.indices is None and sampler.size != size):
            return None
        advances = not sampler.is_distributed
        order = RoutedOrder(
            sampler,
            sampler.seed,
            sampler.indices,
            _replica_of(sampler),
            counts=True,
            advances=advances,
            independence=sampler.independence,
        )
    else:
        return None
    return order if has_common_name(loader.job, order.replica) else None


def has_common_name(options: JobOptions | None, replica: Replica | None) -> bool:
    """Return whether all ranks have a name for their job, or can agree on one."""
    if replica is None or (options is not None and options.name is not None):
        return True
    return process_ranks() == (replica.num_replicas, replica.rank)


def common_name(flow: str, seed: int) -> str:
    """Draw a name for the next job of a flow, and return the same name in all ranks of torch.distributed.

    The rank that calls first writes its name to the store by which the ranks found each other, without a collective
    call. A store may outlive the ranks, so the key of the name contains the number of restarts by torchrun.
    """
    global _counted_by
    store = default_store()
    if store is not _counted_by:
        _counted_by = store
        _opened.clear()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"torch_dpflow/{attempt}/{dist.get_world_size()}/{flow}/{seed}/{next(_opened[flow])}"
    return store.compare_set(key, "", draw_name()).decode()


def _replica_of(sampler: Any) -> Replica | None:
    if sampler.num_replicas == 1:
        return None
    return Replica(rank=sampler.rank, num_replicas=sampler.num_replicas, drop_last=sampler.drop_last)


def job_of(loader: Any, seed: int, order: RoutedOrder | None = None, resumed_seed: int | None = None) -> SharedJob:
    """Return a job of the loader that no iteration uses; open one if necessary. It is closed with the loader.

    Each concurrent iteration therefore has a separate job. The flow counts all jobs of a rank as one, so ranks need not
    begin the same number of iterations.

    Args:
        seed: seed of the order, if the loader has no job to take the seed from.
        order: the order that the router draws; None if the sampler sets the order.
        resumed_seed: the seed of the run that is resumed; a job with another seed is opened.

    Raises:
        The errors of `open_job`.
    """
    runtime: LoaderRuntime = loader._runtime
    jobs = runtime.jobs
    changed = _close_outdated(loader, order)
    if resumed_seed is not None:
        seed = resumed_seed
    elif jobs:
        seed = next(reversed(jobs.values())).seed
    for number, job in list(jobs.items()):
        if job.is_closed:
            del jobs[number]
        elif not job.is_read:
            if job.seed == seed:
                job.collate_with(_collate_fn_of(loader))
                return job
            job.close()
            del jobs[number]
    number = next(free for free in itertools.count(1) if free not in jobs)
    try:
        job = jobs[number] = _open(loader, seed, order, number)
    except UsageError as error:
        if not changed:
            raise
        raise UsageError(
            "the dataset, its transform, worker_init_fn or a setting has changed since the loader was iterated last: "
            f"{error}"
        ) from error
    job.close_with(runtime)
    return job


def _close_outdated(loader: Any, order: RoutedOrder | None) -> bool:
    """Close jobs that differ from the loader in flow, options, order or dataset; return whether any was closed.

    Workers have the content as it was when the first job was opened. If the dataset's own state has changed, the
    cluster accepts or refuses the present content as if it came from another loader. A change elsewhere, such as a
    counter in the script, is logged once.
    """
    runtime: LoaderRuntime = loader._runtime
    reads = None if order is None else (order.seed, order.replica)
    opened_for = (loader.flow, loader.address, loader.job, reads, _part_of(loader.dataset))
    idle = {number: job for number, job in runtime.jobs.items() if not job.is_read}
    if runtime.opened_for is not None and opened_for[:3] != runtime.opened_for[:3]:
        runtime.content = None
    if runtime.content is not None:
        # About as long as pickling the dataset takes, once per epoch.
        own, other = changes_of_flow(_definition(loader), loader.job or JobOptions(), runtime.content)
        _warn_of(other, runtime)
        if own:
            runtime.content = None
        elif opened_for == runtime.opened_for:
            idle = {}
    runtime.opened_for = opened_for
    for number, job in idle.items():
        job.close()
        del runtime.jobs[number]
    return bool(idle)


def _warn_of(changed: dict[str, str], runtime: LoaderRuntime) -> None:
    found = {path: text for path, text in changed.items() if path not in runtime.warned}
    if found:
        runtime.warned.update(found)
        LOADER.warning(
            "what the dataset's code reads has changed since it was sent to the flow's workers, which keep what was "
            "sent: %s. If it does not affect samples, give %s",
            describe_differences(found, script_name()),
            ignoring(found, script_name()),
        )


def _open(loader: Any, seed: int, order: RoutedOrder | None, number: int) -> SharedJob:
    options, replica = loader.job or JobOptions(), None if order is None else order.replica
    ranks = process_ranks()
    if ranks.num_replicas == 1:
        ranks = ranks_of(loader.sampler, loader.batch_sampler, dataset=loader.dataset) or ranks
    name, group = options.name, None
    if dist.is_available() and dist.is_initialized():
        group = weakref.ref(dist.group.WORLD)
    if order is None and name is not None and ranks.num_replicas > 1:
        # All processes of a job may have its name; where the sampler decides, each of them is a job to the flow.
        name = f"{name:.{MAX_NAME - 12}}~rank{ranks.rank}"
    rank = None if replica is None else replica.rank
    alike = [job for job in loader._runtime.jobs.values() if _readers[job][-1] == group]
    if replica is not None and alike and alike[0].replicas == replica.num_replicas:
        name = alike[0].name
    elif name is not None:
        name = _free_name(loader, name, rank, group)
    elif replica is not None:
        name = common_name(loader.flow, seed)
    options = replace(options, name=name)
    flow = _definition(loader)
    reading = JobReading(
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        collate_fn=_collate_fn_of(loader),
        seed=seed,
        indices=None if order is None else order.indices,
        replica=replica,
        side=number,
        independence=0.0 if order is None else order.independence,
    )
    job = open_job(flow, reading, address=loader.address, options=options, content=loader._runtime.content)
    loader._runtime.content = job.content
    _readers[job] = (loader.flow, loader.address, rank, group)
    return job


def _free_name(loader: Any, name: str, rank: int | None, group: Any) -> str:
    """Return the name, with "~2" and so on appended if other iterations of this process use it.

    Ranks open their jobs in the same order, because they run the same script. Jobs of a former process group that have
    the name are closed: their other ranks no longer exist to read the epoch to its end.
    """
    for free in chain([name], (f"{name:.{MAX_NAME - 5}}~{number}" for number in itertools.count(2))):
        is_used = False
        for job, (*read, rank_then, group_then) in list(_readers.items()):
            if job.is_closed or [*read, job.name] != [loader.flow, loader.address, free]:
                continue
            if group_then != group:
                job.close()
            is_used |= group_then == group and rank_then == rank
        if not is_used:
            break
    return free


def _definition(loader: Any) -> FlowDefinition:
    name, version = flow_version(loader.flow)
    return FlowDefinition(
        name=name,
        dataset=loader.dataset,
        version=version,
        workers=max(1, int(loader.num_workers)),
        worker_init_fn=loader.worker_init_fn,
        code="auto" if loader.options is None else loader.options.code,
    )


def _part_of(dataset: Any) -> bytes:
    """Return a digest of the samples of a torch `Subset`; empty for any other dataset."""
    places = _places_of(dataset)
    return b"" if places is None else hashlib.sha256(places.tobytes()).digest()


def _places_of(dataset: Any) -> IndexArray | None:
    """Return the flow's sample numbers that a torch `Subset` contains; None for any other dataset."""
    return unwrapped(dataset)[2]


def settled_state(loader: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's position in an epoch of the router's order, computed from positions of any number of ranks.

    The result can be joined with the other ranks' positions, even if no iteration has begun with it.

    shared: `LoaderState.shared`, of one rank or joined.

    Raises StateError: `shared` does not contain this rank's position, or is a position in other samples.
    """
    order, epoch = routed_order(loader), shared["epoch"]
    if order is None:
        return shared
    places, indices = _places_of(loader.dataset), order.indices
    if places is not None:
        indices = places if indices is None else places[indices]
    replica = order.replica
    rank = None if replica is None else JobRank("", replica.rank, replica.num_replicas, replica.drop_last)
    size = (shared["ranks"][0] if "ranks" in shared else shared)["size"]
    cursor = EpochCursor(
        JobDescription(
            flow=str(loader.flow),
            version=1,
            name="",
            seed=shared["seed"],
            size=size,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            indices=indices,
            rank=rank,
        ),
        epoch,
    )
    cursor.resume(epoch, shared)
    return cursor.state()


def _collate_fn_of(loader: Any) -> Callable[[list[Any]], Any]:
    collate: Callable[[Any], Any] = loader.collate_fn
    if loader._auto_collation:
        return collate
    return lambda samples: collate(samples[0])
