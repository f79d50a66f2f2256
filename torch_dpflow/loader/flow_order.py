"""For which samplers the router of a shared flow decides the order, so that jobs read what others have loaded."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from torch_dpflow._core.torch_private import default_store
from torch_dpflow.cluster.client.options import JobOptions, Replica, draw_name
from torch_dpflow.errors import DeadlineError
from torch_dpflow.samplers import DynaGCSSampler
from torch_dpflow.samplers.indices import IndexArray

#: Counts the jobs of each flow in this process: ranks open them in the same order, as they run the same script.
_opened: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class RoutedOrder:
    """An order that the router decides: each sample of the sampler's set once, every order equally likely.

    A job that is alone in its flow reads what the sampler would have given.
    """

    sampler: Any
    #: Seeds the order, with the epoch; None: the loader's base seed.
    seed: int | None = None
    #: The samples; None: all.
    indices: IndexArray | None = None
    #: Which part of them is this process's; None: all.
    replica: Replica | None = None
    #: Whether the sampler knows the epoch; else the loader counts its iterations.
    counts: bool = False
    #: Whether each iteration is a new epoch to the sampler, without `set_epoch`.
    advances: bool = False
    #: As of `DynaGCSSampler`.
    independence: float = 0.0

    def next_epoch(self, iterations: int, resumed: int | None, *, resumes: bool) -> int:
        """The epoch that the next iteration reads.

        Args:
            iterations: of the loader until now.
            resumed: the epoch that is next by a loaded state.
            resumes: whether it is in the middle of that.
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
    """How the router may stand in for the loader's sampler; None: the sampler's own order is kept.

    It may for what torch makes of `shuffle=True`, and for DistributedSampler and DynaGCSSampler, if they are
    nothing more special than that. For one rank of several it may where the ranks have a name in common: that of
    `JobOptions`, or one by torch.distributed.
    """
    size, sampler, batches = len(loader.dataset), loader.sampler, loader.batch_sampler
    kind: Any = type(sampler)
    if type(batches) is not BatchSampler or id(batches.sampler) != id(sampler):
        return None
    if kind is RandomSampler:
        is_plain = not sampler.replacement and sampler.num_samples == size
        return RoutedOrder(sampler) if is_plain and sampler.data_source is loader.dataset else None
    if kind is DistributedSampler:
        if not sampler.shuffle or len(sampler.dataset) != size:
            return None
        order = RoutedOrder(sampler, sampler.seed, None, _replica_of(sampler), counts=True)
    elif kind is DynaGCSSampler:
        if (
            not sampler.shuffle
            or sampler.group is not None
            or (sampler.indices is None and sampler.size != size)
        ):
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
    """Whether all ranks know a name for their job, or can agree on one."""
    if replica is None or (options is not None and options.name is not None):
        return True
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return (dist.get_world_size(), dist.get_rank()) == (replica.num_replicas, replica.rank)


def common_name(flow: str, *, patience_s: float) -> str:
    """A name for this process's next job of a flow that all ranks of torch.distributed get, and nobody else.

    Rank 0 draws it; the store by which the ranks found each other carries it, so no collective is called and the
    order of those that training calls does not matter.

    Raises:
        DeadlineError: rank 0 has not opened the job.
    """
    store = default_store()
    key = f"torch_dpflow/{flow}/{next(_opened[flow])}"
    if dist.get_rank() == 0:
        store.set(key, draw_name())
    try:
        store.wait([key], timedelta(seconds=patience_s))
    except RuntimeError as error:
        raise DeadlineError(
            f"flow {flow!r}: rank 0 has not begun to read within {patience_s:g} s; every rank has to iterate its "
            "loader, or give the loaders JobOptions(name=...)"
        ) from error
    return store.get(key).decode()


def _replica_of(sampler: Any) -> Replica | None:
    if sampler.num_replicas == 1:
        return None
    return Replica(rank=sampler.rank, num_replicas=sampler.num_replicas, drop_last=sampler.drop_last)
