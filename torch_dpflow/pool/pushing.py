"""Pushing of arrays into the pool: stripe by stripe, each as sealed memory that the server copies.

Arrays come from memory, or from a transform that decodes the samples of a stored dataset to rows of one shape.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.datasets.sample_reader import SampleReader, SampleTable
from torch_dpflow.datasets.spec import DatasetRef, next_version
from torch_dpflow.errors import DPFlowError, OptionError, OptionTypeError, PoolFullError
from torch_dpflow.pool.array_files import array_identity, array_layout
from torch_dpflow.pool.messages import (
    ArraySource,
    CachedDataset,
    GetRecordStates,
    PreloadDataset,
    PushStripe,
    RecordStates,
)
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.address import AddressLike
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.segments import PUSH_SEALS
from torch_dpflow.remote.shipping.content_identity import fingerprint

_Array: TypeAlias = npt.NDArray[Any]
#: Function that returns rows `first` to `stop` - 1 of an array, in C order, for the arguments (first, stop).
RowsOf: TypeAlias = Callable[[int, int], _Array]
#: Interval of queries whether the server has reserved memory, seconds.
_POLL_S = 0.02


def pushed_source(name: str, array: _Array) -> ArraySource:
    """Return the description of an array in memory, equal for equal names and rows, so that a push can be continued.

    Raises OptionError or OptionTypeError if the array cannot be cached, or the name is not NAMESPACE/NAME:VERSION.
    """
    _check_name(name)
    stamp = hashlib.blake2b(_bytes_of(array), digest_size=16).hexdigest()
    source = ArraySource(ref=name, dtype=array.dtype.str, shape=[*array.shape], stamp=stamp)
    array_layout(source)
    return source


def appended_source(old: ArraySource, array: _Array, version: str | None) -> ArraySource:
    """Return the description of a pushed array's next version: the old rows, then the rows of `array`.

    The new version shares every full stripe of the old one. version: VERSION of the new name; None: the next number.

    Raises OptionTypeError if the rows differ in shape or dtype, OptionError for no rows or a wrong name.
    """
    if array.dtype.str != old.dtype or [*array.shape[1:]] != old.shape[1:] or not array.ndim:
        raise OptionTypeError(
            f"rows of {array.dtype.str} and shape {array.shape[1:]} cannot go behind {old.ref}, whose rows are of "
            f"{old.dtype} and shape {tuple(old.shape[1:])}; give them the same form"
        )
    if not len(array):
        raise OptionError(f"no rows to append to {old.ref}; give at least one")
    ref = DatasetRef.parse(old.ref)
    name = f"{ref.id}:{version or next_version(str(ref.version))}"
    _check_name(name)
    if name == old.ref:
        raise OptionError(f"version={version!r} is the version that is appended to; give another")
    stamp = hashlib.blake2b(old.stamp.encode() + _bytes_of(array), digest_size=16).hexdigest()
    rows = array_layout(old)
    return ArraySource(
        ref=name,
        dtype=old.dtype,
        shape=[old.shape[0] + len(array), *old.shape[1:]],
        stamp=stamp,
        base=rows.identity,
        shared=rows.records // rows.per_stripe,
    )


def push(
    address: AddressLike,
    source: ArraySource,
    rows_of: RowsOf,
    *,
    stripes: Iterable[int] | None = None,
    progress: Callable[[CachedDataset], None] = lambda info: None,
) -> CachedDataset:
    """Push an array, or only its stripes `stripes`, as `rows_of` returns them; return the array's state in the pool.

    Stripes that the server has already are skipped. progress: called with the state after each pushed stripe.

    Raises PoolFullError if the rows do not fit, PeerLostError if the server is lost, UsageError if it refuses them.
    """
    rows = array_layout(source)
    request = PreloadDataset(source=source, identity=array_identity(source), is_explicit=True, whole=True)
    with ExitStack() as opened:
        connection = opened.enter_context(PoolConnection(address))
        leader = connection.servers()[0]  # the leader holds pushed arrays, whichever server this process uses
        if leader.is_near:
            connection = opened.enter_context(PoolConnection(leader.directory))
        while not (info := connection.get(request, CachedDataset)).is_placed:
            time.sleep(_POLL_S)
        for stripe in range(source.shared, rows.stripes) if stripes is None else stripes:
            if info.error:
                raise PoolFullError(f"{source.ref}: {info.error}")
            asked = GetRecordStates(rows.identity, [stripe * rows.blocks_per_stripe], 0.0)
            if stripe in connection.get(asked, RecordStates).stripes:
                continue
            own = rows.records_of(stripe)
            content = rows_of(own.start, own.stop)
            if (content.dtype, content.shape) != (rows.dtype, (len(own), *rows.shape)):
                raise OptionTypeError(
                    f"rows of {content.dtype}{content.shape} for {source.ref}, of {rows.dtype}{(len(own), *rows.shape)}"
                )
            _push_stripe(connection, rows.identity, stripe, content)
            info = connection.get(request, CachedDataset)
            progress(info)
    return info


def _push_stripe(connection: PoolConnection, identity: bytes, stripe: int, rows: _Array) -> None:
    fd = os.memfd_create("torch_dpflow_push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _fill(fd, _bytes_of(rows))
        connection.request(PushStripe(identity, stripe), [fd])
    finally:
        os.close(fd)


def _fill(fd: int, content: memoryview) -> None:
    try:
        os.posix_fallocate(fd, 0, len(content))
        done = 0
        while done < len(content):
            done += os.pwrite(fd, content[done:], done)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, PUSH_SEALS)
    except OSError as error:
        raise PoolFullError(f"{len(content):,} bytes to push: {error.strerror}; free some memory") from error


def plain_array(given: Any) -> _Array:
    """Convert a tensor or array-like to a numpy array. Raises OptionTypeError if that is impossible or it is masked."""
    if isinstance(given, np.ma.MaskedArray):
        raise OptionTypeError("the array is masked, and memory has no masks; give array.filled(value)")
    try:
        return np.asarray(given.detach() if hasattr(given, "detach") else given)
    except (TypeError, ValueError, RuntimeError) as error:  # bfloat16, rows of several lengths, memory of a GPU
        raise OptionTypeError(f"a {type(given).__name__} is no array of numbers or bytes: {error}") from error


def _bytes_of(array: _Array) -> memoryview:
    if array.dtype.hasobject:
        raise OptionTypeError("an array of Python objects; give one of numbers or bytes")
    whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return memoryview(whole.reshape(-1).view(np.uint8).data)


def _check_name(name: str) -> None:
    ref = DatasetRef.parse(name)
    if ref.version is None or ref.variant is not None:
        raise OptionError(f"{name!r} names no version of an array; give NAMESPACE/NAME:VERSION, as in lab/rows:v1")


#: Function that decodes a sample's bytes to an array.
Transform: TypeAlias = Callable[[bytes], npt.ArrayLike]
_Pixels: TypeAlias = npt.NDArray[Any]


def push_decoded(
    address: AddressLike,
    stored: SampleTable,
    transform: Transform,
    reader: SampleReader,
    *,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[CachedDataset], None] = lambda info: None,
) -> CachedDataset:
    """Decode and push the stripes of this rank: every `world`-th stripe, starting at stripe `rank`.

    Returns the state of the decoded array in the pool. Closes `reader`, which reads the samples.

    Raises:
        OptionError, OptionTypeError: the transform's arrays differ in shape or dtype, or cannot be cached.
        StorageError, and the transform's errors: a sample cannot be read or decoded; stripes that were pushed stay.
        PoolFullError, PeerLostError: see `push`.
    """
    with closing(reader):
        like = plain_array(transform(reader.read(0)[0]))
        # Another transform makes another dataset; it is identified as flows' stages are.
        name = f"{stored.ref} by {fingerprint(transform)}"
        shape = [len(stored), *like.shape]
        source = ArraySource(ref=name, dtype=like.dtype.str, shape=shape, stamp=identity_of(stored).hex())
        stripes = range(rank, array_layout(source).stripes, world)
        rows_of = partial(_decoded, reader, transform, like)
        return push(address, source, rows_of, stripes=stripes, progress=progress)


def check_part(rank: int, world: int) -> None:
    """Check that these are integers with 0 <= rank < world. Raises OptionError or OptionTypeError."""
    check_int("world", world, minimum=1)
    if check_int("rank", rank, minimum=0) >= world:
        raise OptionError(f"rank={rank} of world={world}: give one below it")


def _decoded(reader: SampleReader, transform: Transform, like: _Pixels, first: int, stop: int) -> _Pixels:
    """Return rows of decoded samples, each of the shape and dtype of `like`."""
    out = np.empty((stop - first, *like.shape), like.dtype)
    for at, sample in enumerate(reader.read_each(range(first, stop))):
        if isinstance(sample, DPFlowError):
            raise sample
        one = plain_array(transform(sample[0]))
        if (one.dtype, one.shape) != (like.dtype, like.shape):
            raise OptionError(
                f"the transform gives {one.dtype}{one.shape} for sample {first + at} of {reader.stored.ref}, "
                f"and {like.dtype}{like.shape} for the first; have it crop, resize or pad to one "
                "shape, or preload without transform=, since samples as they are may have any length"
            )
        out[at] = one
    return out
