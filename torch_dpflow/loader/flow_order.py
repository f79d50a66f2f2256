"""For which samplers the router of a shared flow decides the order, so that jobs read what others have loaded."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler

from torch_dpflow._core.torch_private import default_store
from torch_dpflow.cluster.client.options import JobOptions, Replica, draw_name
from torch_dpflow.errors import OptionError
from torch_dpflow.samplers import DynaGCSSampler
from torch_dpflow.samplers.indices import IndexArray, check_indices

#: Counts the jobs of each flow in this process: ranks open them in the same order, as they run the same script.
_opened: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
#: The store that carries the names of those jobs: another process group counts anew.
_counted_by: Any = None


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

    It may for what torch makes of `shuffle=True`, for a SubsetRandomSampler without a generator of its own, and for
    DistributedSampler and DynaGCSSampler, if they are nothing more special than that. For one rank of several it may
    where the ranks have a name in common: that of `JobOptions`, or one by torch.distributed.

    It may not where torch.distributed has more processes than the sampler has replicas: then some of them are to read
    the same batches, as tensor-parallel and context-parallel peers do, and the sampler's seed sees to that. Nor may it
    where the user has fixed the order by a generator in the sampler.
    """
    size, sampler, batches = len(loader.dataset), loader.sampler, loader.batch_sampler
    kind: Any = type(sampler)
    if type(batches) is not BatchSampler or id(batches.sampler) != id(sampler):
        return None
    if process_rank()[1] > getattr(sampler, "num_replicas", 1):
        return None
    if kind is RandomSampler:
        is_plain = (
            not sampler.replacement and sampler.num_samples == size and sampler.generator is loader.generator
        )
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
    return process_rank() == (replica.rank, replica.num_replicas)


def process_rank() -> tuple[int, int]:
    """This process's rank in torch.distributed, and of how many; 0 of 1 without that."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def common_name(flow: str, seed: int) -> str:
    """A name for this process's next job of a flow that all ranks of torch.distributed get, and no other process.

    The rank that is first draws it; the store by which the ranks found each other carries it. So no rank waits, no
    collective is called, and the order of those that training calls does not matter. A store may outlive the ranks, as
    after a restart by torchrun; its key is of this attempt, and a name that is left of another one serves all ranks
    alike.
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
