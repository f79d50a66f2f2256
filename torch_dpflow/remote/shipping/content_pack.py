"""Pickles of the content that workers load: with the script's code, without storage credentials, within a size limit.

cloudpickle includes the code of a script's, or a notebook's, classes. But a sample is pickled with the names of its
classes, and pickle looks up these names when it writes and when it reads. So a worker puts the script's classes into
its `__main__`. A job looks them up in its own `__main__`, in their present form, because a notebook's cell may have
been run again.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from operator import itemgetter
from typing import IO, Any, Protocol

import cloudpickle
import numpy as np
import torch

from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.ipc.serialization.pickling import children_of, explain_loading
from torch_dpflow.remote.shipping.modules import is_definition, module_of
from torch_dpflow.remote.shipping.reducers import (
    in_its_module,
    in_order,
    in_place_of_name,
    reduce_by_value,
    with_class_bodies,
)


def pack(obj: Any, *, sent_arguments: Collection[str] | None = None, replaced: Collection[int] = ()) -> bytes:
    """Pickle `obj`, including code of the script's classes and functions. Raises any error of pickling.

    Args:
        sent_arguments: names of the attributes of `argparse.Namespace` that are sent; None: all.
        replaced: ids of functions that are sent by value although workers could import them by their names.
    """
    out = io.BytesIO()
    ScriptPickler(out, sent_arguments=sent_arguments, replaced=replaced).pack(obj)
    return out.getvalue()


def unpack(packed: IO[bytes]) -> Any:
    """Return the object that `pack` pickled; put the script's classes and functions into this process's `__main__`."""
    for name in SCRIPT:  # whichever of the two names the script had where this was pickled
        sys.modules.setdefault(name, sys.modules["__main__"])
    unpickler = pickle.Unpickler(packed)
    obj, own = unpickler.load(), unpickler.load()
    for name, value in sorted(own.items()):
        value.__qualname__ = name  # cloudpickle forgets what a class is inside of
        if "<" not in name:
            _put(value, name, own)
    return obj


class Output(Protocol):
    """The file that a pickle is written to."""

    def write(self, chunk: Any, /) -> object:
        """Write a chunk of a pickle."""


class ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that also collects the script's classes and functions, in `own`. Call `pack`, not `dump`.

    A class whose `__reduce__` calls cloudpickle would hide its parts from this pickler. It must therefore also define
    `__reduce_by_value__`, which this pickler calls instead. sent_arguments, replaced: as in the function `pack`.
    """

    def __init__(
        self, out: Output, *, sent_arguments: Collection[str] | None = None, replaced: Collection[int] = ()
    ) -> None:
        super().__init__(out, protocol=5)
        self.own: dict[str, Any] = {}
        self._sent_arguments = sent_arguments
        self._replaced = replaced

    def pack(self, obj: Any) -> None:
        """Write the pickle of `obj` that `unpack` reads."""
        with script_by_value():
            self.dump(obj)
            self.dump(self.own)

    def reducer_override(self, obj: Any) -> Any:
        by_value = getattr(type(obj), "__reduce_by_value__", None)
        if by_value is not None:
            return by_value(obj)
        is_defined = is_definition(obj)
        if is_defined and module_of(obj) in SCRIPT:
            name = obj.__qualname__
            # If two have one name, the present one: a cell was run again.
            if name not in self.own or vars(sys.modules[module_of(obj)]).get(name) is obj:
                self.own[name] = obj
        is_replaced = id(obj) in self._replaced
        reduced = reduce_by_value(obj, self._sent_arguments, is_replaced=is_replaced)
        if reduced is not NotImplemented:
            return reduced
        is_function = type(obj) is types.FunctionType
        if is_function and is_replaced:
            reduced = self._dynamic_function_reduce(obj)
        elif not is_defined and isinstance(obj, types.FunctionType):  # a proxy, as those of wrapt
            reduced = NotImplemented
        else:
            reduced = super().reducer_override(obj)
        if is_function and reduced is not NotImplemented:
            return in_its_module(obj, reduced) or with_class_bodies(obj, reduced)
        if isinstance(reduced, tuple) and is_defined and len(reduced) > 2:
            return in_order(obj, reduced)
        if reduced is NotImplemented and not is_defined:
            return in_place_of_name(obj, self.dispatch_table)
        return reduced


@contextmanager
def script_by_value() -> Iterator[None]:
    """Pickle the script's module by value during the body, even if it is `__mp_main__`, as in a spawned process."""
    main = sys.modules["__main__"]
    if main.__name__ in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def _put(value: Any, name: str, own: Mapping[str, Any]) -> None:
    """Set a class or function at its dotted name. A class that was sent has its attributes already, and keeps them.

    The class may have a property, a static method or a replacement at the name of the function.
    """
    holder: Any = sys.modules[value.__module__]
    *outer, last = name.split(".")
    for depth, part in enumerate(outer, 1):
        sent = own.get(".".join(outer[:depth]))
        if isinstance(sent, type):
            return
        if part not in vars(holder):
            setattr(holder, part, types.SimpleNamespace())
        holder = vars(holder)[part]
        if not isinstance(holder, type | types.SimpleNamespace):
            return
    if isinstance(value, type) or not isinstance(holder, type):
        setattr(holder, last, value)


#: Default maximum of a load spec's pickle, in bytes.
MAX_CONTENT_BYTES = 256 << 20
#: The user's parts of a load spec.
_PARTS = ("dataset", "collate_fn", "worker_init_fn")
#: In the search for what is large: maximum parts of an object, maximum levels, and maximum bytes of a part that are
#: counted.
_MAX_PARTS, _MAX_DEPTH, _MAX_COUNTED_BYTES = 1_000, 10, 64 << 30
#: A pickler writes in frames of this size, so that less of what cannot be pickled to its end is counted.
_FRAME_BYTES = 1 << 16


class _TooLargeError(Exception):
    """Exception: a pickle has more bytes than are allowed."""


def pack_load_spec(
    spec: Any, *, limit: int = MAX_CONTENT_BYTES, before: Any = None, replaced: Collection[int] = ()
) -> bytes:
    """Pickle a `LoadSpec` for workers; `unpack_load_spec` is its inverse.

    Args:
        limit: maximum bytes.
        before: object that is unpickled before `spec`; `unpack_load_spec` then returns both. None: nothing.
        replaced: as in `pack`.

    Raises:
        NotPicklableError: a part of `spec` cannot be pickled; the message has its path.
        OptionError: the pickle is larger than `limit`; the message names the large part.
    """
    out = io.BytesIO()
    try:
        with keys_left_out():
            _BoundedPickler(_Bounded(out, limit), limit, replaced).pack(spec if before is None else (before, spec))
    except _TooLargeError:
        raise _too_large(spec, limit) from None
    except Exception as error:
        loads = {name: getattr(spec, name) for name in _PARTS}
        raise explain_loading(loads, error, dump=_dump, workers="a platform") from error
    return out.getvalue()


def can_pack(obj: Any, limit: int, replaced: Collection[int] = ()) -> bool:
    """Return whether an object can be pickled, in at most `limit` bytes. replaced: as in `pack`."""
    try:
        _BoundedPickler(_Bounded(None, limit), limit, replaced).pack(obj)
    except Exception:  # code of the object's own runs
        return False
    return True


def unpack_load_spec(packed: bytes | memoryview) -> Any:
    """Return the `LoadSpec` that `pack_load_spec` pickled, or (before, spec) if that was called with `before`.

    Defines the script's classes here, as `unpack` does. Raises any error of unpickling, such as ModuleNotFoundError.
    """
    return unpack(io.BytesIO(packed))


def keys_left_out() -> AbstractContextManager[None]:
    """Leave storage credentials out of pickles during the body: jobs that read the same data may differ in them."""
    module = sys.modules.get("torch_dpflow.datasets.storage.credentials")
    return nullcontext() if module is None else module.leave_out_keys()


class _Bounded:
    """File that accepts only a limited number of bytes."""

    def __init__(self, out: IO[bytes] | None, limit: int) -> None:
        self._out = out
        self._limit = limit
        self.taken = 0

    def write(self, chunk: Any) -> None:
        self.count(memoryview(chunk).nbytes)  # a PickleBuffer has no length
        if self._out is not None:
            self._out.write(chunk)

    def count(self, nbytes: int) -> None:
        self.taken += nbytes
        if self.taken > self._limit:
            raise _TooLargeError


class _BoundedPickler(ScriptPickler):
    """Pickler that stops at the first tensor or array that is too large: pickling one takes twice its memory."""

    def __init__(self, out: _Bounded, limit: int, replaced: Collection[int] = ()) -> None:
        super().__init__(out, replaced=replaced)
        self._limit = limit

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor | np.ndarray) and _nbytes(obj) > self._limit:
            raise _TooLargeError
        return super().reducer_override(obj)


class _CountingPickler(ScriptPickler):
    """Pickler that counts bytes, and those of tensors and arrays without pickling them."""

    def __init__(self, out: _Bounded) -> None:
        super().__init__(out)
        self._count = out.count

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, np.ndarray) and not getattr(getattr(obj, "dtype", None), "hasobject", False):
            self._count(_nbytes(obj))
            return str, ()
        return super().reducer_override(obj)


def _nbytes(obj: Any) -> int:
    try:
        return int(obj.nbytes)
    except Exception:  # tensors without storage, sparse ones among them
        return 0


def _dump(obj: Any) -> None:
    with keys_left_out():
        ScriptPickler(_Bounded(None, _MAX_COUNTED_BYTES)).pack(obj)


def _size_of(obj: Any) -> int:
    """Return the number of bytes of an object's pickle, or of the part of it that can be pickled."""
    out = _Bounded(None, _MAX_COUNTED_BYTES)
    with suppress(Exception), keys_left_out():
        _CountingPickler(out).pack(obj)
    return out.taken


def _too_large(spec: Any, limit: int) -> OptionError:
    begin, obj, whole = _largest(((name, getattr(spec, name)) for name in _PARTS), _MAX_COUNTED_BYTES)
    path = begin
    for _ in range(_MAX_DEPTH):
        step, part, nbytes = _largest(islice(children_of(obj), _MAX_PARTS), whole)
        if nbytes <= whole // 2:
            break
        path, obj, whole = path + step, part, nbytes
    if path == begin:  # it may be in variables of the script that its functions use
        name, part, nbytes = _largest(_variables(), whole)
        if nbytes > whole // 2:
            path, obj, whole = f"the script's variable {name}", part, nbytes
    kind = f"{module_of(type(obj))}.{type(obj).__qualname__}"
    return OptionError(
        f"{path} of type {kind} pickles to {whole / 1e6:,.0f} MB, and workers on other hosts are sent "
        f"{limit / 1e6:,.0f} MB at most, with everything: keep it in a file or in a DatasetStore that they can read, "
        "and open that where the first sample is read"
    )


def _variables() -> Iterator[tuple[str, Any]]:
    no_data = type | types.FunctionType | types.ModuleType
    for name, value in vars(sys.modules["__main__"]).items():
        if not name.startswith("__") and not isinstance(value, no_data):
            yield name, value


def _largest(parts: Iterable[tuple[str, Any]], most: int) -> tuple[str, Any, int]:
    """Return (name, part, size) of the largest part of at most `most` bytes."""
    sized = ((path, obj, _size_of(obj)) for path, obj in parts)
    fitting = (one for one in sized if one[2] <= most + _FRAME_BYTES)
    return max(fitting, key=itemgetter(2), default=("", None, -1))


#: Ends a flow's content: the length of the archive before it, and a mark. A pickle ends with another byte.
_END = struct.Struct("<Q8s")
_MARK = b"dpflow/1"


def join_content(pickled: bytes, code: bytes) -> bytes:
    """Join a flow's pickle and an archive of modules, which may be empty. Unpickling reads only the pickle."""
    return b"".join((pickled, code, _END.pack(len(code), _MARK)))


def code_in(content: IO[bytes]) -> bytes:
    """Return the archive of modules in a file with a flow's content; empty if the content has no archive.

    The position in the file does not change.
    """
    position, size = content.tell(), content.seek(0, os.SEEK_END)
    try:
        content.seek(max(0, size - _END.size))
        tail = content.read()
        length, mark = _END.unpack(tail) if len(tail) == _END.size else (0, b"")
        if mark != _MARK or length > size - _END.size:
            return b""
        content.seek(size - _END.size - length)
        return content.read(length)
    finally:
        content.seek(position)


def split_content(content: memoryview) -> tuple[memoryview, memoryview]:
    """Split a flow's content into (pickle, archive of modules).

    Raises MessageError if it was not made by `join_content`, for example if it is for workers on the cluster's host.
    """
    if content.nbytes >= _END.size:
        length, mark = _END.unpack(content[-_END.size :])
        if mark == _MARK and length <= content.nbytes - _END.size:
            pickled = content.nbytes - _END.size - length
            return content[:pickled], content[pickled : pickled + length]
    raise MessageError(
        "the flow was registered by a job that did not know where its workers run: give it the connection file "
        "that `dpflow up` has written, and a new version of the flow"
    )
