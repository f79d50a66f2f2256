"""Samples of a stored dataset in decoded form: clients decode each once, and push rows of one shape into the pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.cluster.client.fingerprint import fingerprint
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import DPFlowError, OptionError
from torch_dpflow.pool.lanes.pool_address import AddressLike
from torch_dpflow.pool.messages.protocol import ArraySource, SetInfo
from torch_dpflow.pool.pushing import push
from torch_dpflow.pool.sources.arrays import array_set
from torch_dpflow.pool.sources.set_names import identity_of

#: The bytes of a sample to an array.
Transform: TypeAlias = Callable[[bytes], npt.ArrayLike]
_Pixels: TypeAlias = npt.NDArray[Any]


def push_decoded(
    address: AddressLike,
    stored: StoredDataset,
    transform: Transform,
    reader: SampleReader,
    *,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[SetInfo], None] = lambda info: None,
) -> SetInfo:
    """Decode the stripes of this rank, every world-th one from its own number on, and push them.

    Raises:
        OptionError: the transform gives arrays of several shapes or types, or such as cannot be held.
        StorageError, and what the transform raises: a sample cannot be read or decoded; what was pushed stays.
        PoolFullError, PeerLostError: as for `push`.
    """
    with closing(reader):
        like = np.asarray(transform(reader.read(0)[0]))
        # A transform that differs makes another set: its fingerprint is that of flows' stages.
        name = f"{stored.ref} by {fingerprint(transform)}"
        shape = [len(stored), *like.shape]
        source = ArraySource(ref=name, dtype=like.dtype.str, shape=shape, stamp=identity_of(stored).hex())
        stripes = range(rank, array_set(source).stripes, world)
        rows_of = partial(_decoded, reader, transform, like)
        return push(address, source, rows_of, stripes=stripes, progress=progress)


def check_part(rank: int, world: int) -> None:
    """Raise OptionError, or OptionTypeError, unless a process of this rank is one of so many."""
    check_int("world", world, minimum=1)
    if check_int("rank", rank, minimum=0) >= world:
        raise OptionError(f"rank={rank} of world={world}: give one below it")


def _decoded(reader: SampleReader, transform: Transform, like: _Pixels, first: int, stop: int) -> _Pixels:
    """Rows of decoded samples, each of the form of `like`."""
    out = np.empty((stop - first, *like.shape), like.dtype)
    for at, sample in enumerate(reader.read_each(range(first, stop))):
        if isinstance(sample, DPFlowError):
            raise sample
        one = np.asarray(transform(sample[0]))
        if (one.dtype, one.shape) != (like.dtype, like.shape):
            raise OptionError(
                f"the transform gives {one.dtype}{one.shape} for sample {first + at} of {reader.stored.ref}, "
                f"and {like.dtype}{like.shape} for the first; have it crop, resize or pad to one "
                "shape, or preload without transform=, since samples as they are may have any length"
            )
        out[at] = one
    return out
