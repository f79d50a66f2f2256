"""Arrays that clients push into the pool: stripe by stripe, each as sealed memory that the server copies."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpflow.datasets.names import DatasetRef, next_version
from torch_dpflow.errors import OptionError, OptionTypeError, PoolFullError
from torch_dpflow.pool.lanes.pool_address import AddressLike
from torch_dpflow.pool.lanes.pool_connection import PoolConnection
from torch_dpflow.pool.lanes.regions import PUSH_SEALS
from torch_dpflow.pool.messages.protocol import (
    ArraySource,
    PreloadSet,
    PushStripe,
    RecordStates,
    SetInfo,
    WantRecords,
)
from torch_dpflow.pool.sources.arrays import array_identity, array_set

_Array: TypeAlias = npt.NDArray[Any]
#: The rows from one on, up to another (excluded), in C order.
RowsOf: TypeAlias = Callable[[int, int], _Array]
#: How often a server is asked whether memory is there, seconds.
_POLL_S = 0.02


def pushed_source(name: str, array: _Array) -> ArraySource:
    """What names an array in memory: its content too, so whoever pushes the same again goes on with the same set.

    Raises OptionError, OptionTypeError: it cannot be a set, or the name is not NAMESPACE/NAME:VERSION.
    """
    _check_name(name)
    stamp = hashlib.blake2b(_bytes_of(array), digest_size=16).hexdigest()
    source = ArraySource(ref=name, dtype=array.dtype.str, shape=[*array.shape], stamp=stamp)
    array_set(source)
    return source


def appended_source(old: ArraySource, array: _Array, version: str | None) -> ArraySource:
    """What names a further version of a pushed array, which shares every full stripe of the old one.

    Raises OptionError, OptionTypeError: the rows are of another form, or none; or the name is taken or wrong.
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
    rows = array_set(old)
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
    progress: Callable[[SetInfo], None] = lambda info: None,
) -> SetInfo:
    """Have a server hold these rows, all or, by `stripes`, some of them; those that it has already are left out.

    Raises PoolFullError: there is no room; PeerLostError: there is no server, or it has died.
    """
    rows = array_set(source)
    request = PreloadSet(source=source, identity=array_identity(source), is_explicit=True, whole=True)
    with ExitStack() as opened:
        connection = opened.enter_context(PoolConnection(address))
        head = connection.servers()[0]  # which has it, whomever this process asks
        if head.is_near:
            connection = opened.enter_context(PoolConnection(head.directory))
        while not (info := connection.get(request, SetInfo)).is_placed:
            time.sleep(_POLL_S)
        for stripe in range(source.shared, rows.stripes) if stripes is None else stripes:
            if info.error:
                raise PoolFullError(f"{source.ref}: {info.error}")
            asked = WantRecords(rows.identity, [stripe * rows.blocks_per_stripe], 0.0)
            if stripe in connection.get(asked, RecordStates).stripes:
                continue
            own = rows.records_of(stripe)
            content = rows_of(own.start, own.stop)
            if (content.dtype, content.shape) != (rows.dtype, (len(own), *rows.shape)):
                raise OptionTypeError(
                    f"rows of {content.dtype}{content.shape} for {source.ref}, of {rows.dtype}{(len(own), *rows.shape)}"
                )
            _push_stripe(connection, rows.identity, stripe, content)
            info = connection.get(request, SetInfo)
            progress(info)
    return info


def _push_stripe(connection: PoolConnection, identity: bytes, stripe: int, rows: _Array) -> None:
    fd = os.memfd_create("torch_dpflow_push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _fill(fd, _bytes_of(rows))
        connection.ask(PushStripe(identity, stripe), [fd])
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


def _bytes_of(array: _Array) -> memoryview:
    if array.dtype.hasobject:
        raise OptionTypeError("an array of Python objects; give one of numbers or bytes")
    whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return memoryview(whole.reshape(-1).view(np.uint8).data)


def _check_name(name: str) -> None:
    ref = DatasetRef.parse(name)
    if ref.version is None or ref.variant is not None:
        raise OptionError(
            f"{name!r} names no version of an array; give NAMESPACE/NAME:VERSION, as in lab/rows:v1"
        )
