"""Ranks that share an epoch, from given numbers, from torch.distributed, or from a sampler's attributes."""

from collections.abc import Iterator
from numbers import Integral
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from torch_dpflow._core.checks import check_int, working
from torch_dpflow._core.dealing import MAX_RANKS
from torch_dpflow.errors import OptionError, OptionTypeError


def own_rank(num_replicas: int | None, rank: int | None, ranks: Any = None) -> tuple[int, int, bool]:
    """Return (number of ranks, this process's rank, whether the number was given or torch.distributed is initialised).

    Args:
        num_replicas: number of ranks; by default that of torch.distributed, if it is initialised, else 1.
        rank: this rank; by default that of torch.distributed, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh or a process group that defines both.

    Raises:
        OptionError: a number is out of range; `ranks` lacks this process, is not 1-D, or is given with a number.
        OptionTypeError: an argument is of the wrong type.
    """
    if ranks is not None:
        if num_replicas is not None or rank is not None:
            raise OptionError(f"num_replicas={num_replicas} and rank={rank}: both come from ranks=; leave them out")
        return *_rank_in(ranks), True
    is_distributed = (dist.is_available() and dist.is_initialized()) or num_replicas is not None
    if num_replicas is None:
        num_replicas = process_ranks().num_replicas
    if rank is None:
        rank = process_ranks().rank
    replicas = check_int("num_replicas", num_replicas, minimum=1, maximum=MAX_RANKS)
    return replicas, check_int("rank", rank, minimum=0, maximum=replicas - 1), is_distributed


def _rank_in(ranks: Any) -> tuple[int, int]:
    """Return the number of ranks of a mesh or process group, and the rank of this process."""
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh  # not there in a torch without torch.distributed

        if isinstance(ranks, DeviceMesh):
            return _rank_in_mesh(ranks)
        # torch's new_group() returns this number in processes that it leaves out.
        if ranks is dist.GroupMember.NON_GROUP_MEMBER:
            raise _outside("the process group")
        if isinstance(ranks, dist.ProcessGroup):
            rank = dist.get_rank(ranks)
            if rank < 0:
                raise _outside("the process group")
            return dist.get_world_size(ranks), rank
    raise OptionTypeError(
        f"ranks={ranks!r:.80} is of type {type(ranks).__name__}; give one dimension of a DeviceMesh, such as "
        "mesh['dp'], or a process group of torch.distributed"
    )


def _rank_in_mesh(mesh: Any) -> tuple[int, int]:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("dp",)
        raise OptionError(
            f"ranks= is a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names or 'without names'}; slice it to those "
            f"that read different samples: mesh[{names[0]!r}], or mesh[NAME, NAME]._flatten() for several"
        )
    if mesh.get_coordinate() is None:
        raise _outside("the mesh")
    return mesh.size(), mesh.get_local_rank()


def _outside(what: str) -> OptionError:
    return OptionError(
        f"ranks=: this process is not in {what}; make the sampler in its processes only, or give num_replicas= and "
        "rank= here"
    )


class Ranks(NamedTuple):
    """Number of the ranks that read an epoch together, and the rank of one of them."""

    num_replicas: int
    rank: int


#: The names that libraries give to a sampler's number of ranks and its rank.
_NAMES = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("world_size", "rank"),
    ("data_parallel_size", "data_parallel_rank"),
)
#: The attributes that hold the sampler which another one wraps.
_WRAPPED = ("sampler", "batch_sampler", "_sampler", "_batch_sampler")
_MAX_NESTED = 16


def ranks_of(*samplers: Any, dataset: Any = None) -> Ranks | None:
    """Return the ranks among which a loader's samplers divide an epoch; None if no sampler has attributes for ranks.

    If several samplers have them, the first with more than one rank counts, otherwise the first.

    Args:
        samplers: the samplers and batch samplers of a loader, in any order.
        dataset: the loader's dataset, in which no samplers are searched.
    """
    found = [ranks for part in nested_samplers(*samplers, dataset=dataset) if (ranks := named_ranks(part)) is not None]
    return next((ranks for ranks in found if ranks.num_replicas > 1), found[0] if found else None)


def nested_samplers(*samplers: Any, dataset: Any = None) -> Iterator[Any]:
    """Yield these samplers and the samplers that they wrap, each once, at most 16. dataset: as in `ranks_of`."""
    parts = list(samplers)
    passed: list[Any] = []
    for part in parts:
        if part is None or any(part is other for other in passed):
            continue
        if len(passed) == _MAX_NESTED:  # an object may make an attribute of any name
            return
        passed.append(part)
        yield part
        parts += [working(part, name) for name in _WRAPPED]
        of = working(part, "dataset")
        if isinstance(part, DistributedSampler) and of is not dataset:
            # Wrappers make a dataset of the sampler, for DistributedSampler to divide.
            parts += [inner for name in _WRAPPED if isinstance(inner := working(of, name), Sampler)]


def named_ranks(sampler: Any) -> Ranks | None:
    """Return the ranks in the attributes of this sampler or dataset; None if it has no such attributes."""
    for count, own in _NAMES:
        replicas, rank = _number(working(sampler, count)), _number(working(sampler, own))
        if replicas is not None and replicas > 0:
            return Ranks(replicas, process_ranks().rank % replicas if rank is None else rank)
    return None


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, Integral) else None


def process_ranks() -> Ranks:
    """Return the number of processes of torch.distributed and the rank of this one; 1 and 0 without it."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_world_size(), dist.get_rank())
    return Ranks(1, 0)
