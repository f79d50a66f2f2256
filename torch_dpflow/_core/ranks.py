"""The ranks that share an epoch, by numbers or by torch.distributed."""

from typing import Any

import torch.distributed as dist

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionError, OptionTypeError


def own_rank(num_replicas: int | None, rank: int | None, ranks: Any = None) -> tuple[int, int, bool]:
    """Return the number of ranks, this one, and whether the caller has ranks at all.

    Args:
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh or a process group to take both from.

    Raises:
        OptionError: a number is out of range, this process is not in `ranks`, or both ways are given.
        OptionTypeError: an argument is of the wrong type.
    """
    if ranks is not None:
        if num_replicas is not None or rank is not None:
            raise OptionError(
                f"num_replicas={num_replicas} and rank={rank} beside ranks=: both come from ranks=; give one of the two"
            )
        return *_rank_in(ranks), True
    initialised = dist.is_available() and dist.is_initialized()
    is_distributed = initialised or num_replicas is not None
    if num_replicas is None:
        num_replicas = dist.get_world_size() if initialised else 1
    if rank is None:
        rank = dist.get_rank() if initialised else 0
    replicas = check_int("num_replicas", num_replicas, minimum=1)
    return replicas, check_int("rank", rank, minimum=0, maximum=replicas - 1), is_distributed


def _rank_in(ranks: Any) -> tuple[int, int]:
    """Return the number of ranks of a mesh or process group, and this process's one."""
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
