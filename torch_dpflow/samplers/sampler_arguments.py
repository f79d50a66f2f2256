"""Checks of the arguments of `DynaGCSSampler`."""

from collections.abc import Sized

import numpy as np
import torch
import torch.distributed as dist

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import IndexArray, check_indices


def given_indices(data_source: object) -> IndexArray | None:
    """The indices, if `data_source` is a sequence of whole numbers; None if it is a data set."""
    if isinstance(data_source, range):
        return check_indices(data_source, name="data_source", allow_empty=True)
    if isinstance(data_source, torch.Tensor):
        array = data_source.numpy(force=True)
    elif isinstance(data_source, np.ndarray):
        array = data_source
    elif isinstance(data_source, list | tuple) and all(_is_index(x) for x in data_source):
        array = np.asarray(data_source, np.int64)
    else:
        return None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        return None
    try:
        return check_indices(array, name="data_source", allow_empty=True)
    except OptionError as error:
        raise OptionError(
            f"{error}. Whole numbers are taken as indices; for a data set made of them pass range(len(...))"
        ) from error


def _is_index(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def length_of(data_source: Sized) -> int:
    try:
        return len(data_source)
    except TypeError as error:
        raise OptionTypeError(
            f"data_source is a {type(data_source).__name__} without a length; give a map-style data set, "
            "or the indices to read"
        ) from error


def own_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int, bool]:
    """Number of ranks, this one, and whether the caller has ranks at all."""
    initialised = dist.is_available() and dist.is_initialized()
    is_distributed = initialised or num_replicas is not None
    if num_replicas is None:
        num_replicas = dist.get_world_size() if initialised else 1
    if rank is None:
        rank = dist.get_rank() if initialised else 0
    replicas = check_int("num_replicas", num_replicas, minimum=1)
    return replicas, check_int("rank", rank, minimum=0, maximum=replicas - 1), is_distributed


def check_group(group: SamplingGroup, strategy: str, length: int | None) -> None:
    if not isinstance(group, SamplingGroup):
        raise OptionTypeError(
            f"group={group!r} is of type {type(group).__name__}; make one with sampling_group()"
        )
    if group.strategy != strategy:
        raise OptionError(
            f"the group's strategy is {group.strategy!r}, the sampler's {strategy!r}; "
            f"pass strategy={group.strategy!r}, or a group made with {strategy!r}"
        )
    if length is not None and length != group.size:
        raise OptionError(
            f"the group is for {group.size} samples, the data set has {length}; "
            "make the group for this data set, or pass the indices to read"
        )
