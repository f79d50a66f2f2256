"""Pickling of tensors, storages and arrays with their memory outside of the pickle; errors name the part at fault.

A tensor is pickled as its storage, dtype, shape, strides and offset; two tensors of one storage share it again after
decoding, through pickle's memo. A storage or an array is pickled as a stand-in for a buffer, and its memory is added to
`sources`. Other layouts and subclasses are pickled by torch, down to their storages. The reductions that torch
registers with multiprocessing's ForkingPickler are not used, so no descriptors are passed. The memory of a big bytes
object leaves the pickle too; decoding copies it, because bytes own their memory.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.storage import TypedStorage

from torch_dpflow._core.checks import working
from torch_dpflow._core.torch_private import typed_storage, untyped_storage
from torch_dpflow.errors import NotPicklableError
from torch_dpflow.ipc.memory.segment import Memory, address_of, memory_of, storage_over, tensor_over
from torch_dpflow.ipc.messages.headers import WORD
from torch_dpflow.log import TRANSPORT

#: A view is sent without the rest of its storage if it takes up less than this share, and saves at least these bytes.
_SPAN_SHARE = 0.5
_SPAN_SLACK_BYTES = 4096
#: Kinds of numpy dtype that `dtype.str` describes completely.
_PLAIN_KINDS = frozenset("biufcSUmM")

#: A dtype by itself is pickled by reference, which takes longer than the rest of a small tensor.
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class MemoryRange(NamedTuple):
    """Range of memory that a payload refers to."""

    #: The address; for a bytes object its id, which is as unique and cheaper to get.
    key: int
    nbytes: int
    #: Object that keeps the memory alive. Its type is bytes only if the memory is that of a pickled bytes object.
    owner: Any
    #: The alignment that the decoded memory needs, bytes.
    alignment: int = WORD

    @property
    def address(self) -> int:
        return address_of(np.frombuffer(self.owner, np.uint8)) if type(self.owner) is bytes else self.key

    def view(self) -> bytes | memoryview:
        """Return the memory, without a copy."""
        owner = self.owner
        if type(owner) is bytes:
            return owner
        if isinstance(owner, torch.UntypedStorage):
            owner = memory_of(owner)
        if isinstance(owner, np.ndarray):
            owner = owner.reshape(-1, order="A").view(np.uint8).data
        return memoryview(owner)


class _Span(NamedTuple):
    """Part of a storage, which is sent instead of the whole storage."""

    memory: Memory


#: pickle writes a bytes object of at least this size by a separate `write`, without a copy.
_APART_BYTES = 1 << 16
#: Opcodes: call `bytes` with the next buffer.
_BYTES_OF_BUFFER = pickle.GLOBAL + b"builtins\nbytes\n" + pickle.NEXT_BUFFER + pickle.TUPLE1 + pickle.REDUCE
#: Stands for memory in the pickle. Writable, or pickle would make the decoded memory read-only.
_STAND_IN = pickle.PickleBuffer(bytearray(1))


class _Stream:
    """File that pickle writes to: big bytes objects go to `sources`, everything else to `chunks`.

    pickle passes a big bytes object itself to `write`, after a chunk that ends with its opcode and length, outside of
    any pickle frame. The opcode and the length are replaced by opcodes that make bytes of the next buffer; the pickle
    remains valid.
    """

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.sources: list[MemoryRange] = []

    def write(self, chunk: Any) -> None:
        """Write a chunk of the stream, or the content of one big object. pickle calls this."""
        if len(chunk) >= _APART_BYTES and type(chunk) is bytes and not _begins_with_frame(chunk):
            header = _bytes_header(len(chunk))
            if self.chunks and self.chunks[-1].endswith(header):
                self.chunks[-1] = self.chunks[-1][: -len(header)] + _BYTES_OF_BUFFER
                self.sources.append(MemoryRange(id(chunk), len(chunk), chunk))
                return
        self.chunks.append(chunk)


class _PlainStream:
    """File for a Python whose pickle does not write as `_Stream` expects: everything goes to `chunks`."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.sources: list[MemoryRange] = []
        self.write = self.chunks.append


def _begins_with_frame(chunk: bytes) -> bool:
    """Return whether this chunk may be pickle's own output, so that the chunk before it announced no bytes object.

    pickle itself writes chunks of this size only in frames. A bytes object that looks like a frame stays in the stream.
    """
    return chunk[:1] == pickle.FRAME and int.from_bytes(chunk[1:9], "little") <= len(chunk)


def _bytes_header(size: int) -> bytes:
    if size <= 0xFFFFFFFF:
        return pickle.BINBYTES + size.to_bytes(4, "little")
    return pickle.BINBYTES8 + size.to_bytes(8, "little")


class PayloadPickler(pickle.Pickler):
    """Pickler into `chunks`. The memory of tensors, arrays and big bytes goes to `sources`, in the order of pickling.

    laid_out: called with each tensor that `is_plain`; returns a tensor of the same values to be pickled in its place.
    """

    def __init__(self, *, laid_out: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._laid_out = laid_out
        stream = _new_stream()
        self.chunks = stream.chunks
        self.sources = stream.sources
        # Not a bound method: a reference cycle would leave the batch's memory to the garbage collector.
        super().__init__(stream, protocol=5, buffer_callback=partial(_take_buffer, self.sources))

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object, or NotImplemented for pickle's own way. Called by pickle."""
        reduce = _REDUCERS.get(type(obj))
        if reduce is not None:
            return reduce(self, obj)
        if isinstance(obj, torch.Tensor):
            _refuse_graph(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            _refuse_graph(tensor)
            return NotImplemented
        if self._laid_out is not None:
            tensor = self._laid_out(tensor)
        storage: Any = tensor.untyped_storage()
        offset = int(tensor.storage_offset())
        if tensor.numel() * tensor.itemsize != storage.nbytes():
            storage, offset = _narrow(tensor, storage, offset)
        name = _DTYPE_NAMES[tensor.dtype]
        return rebuild_tensor, (storage, name, tuple(tensor.shape), tensor.stride(), offset)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return rebuild_storage_on, (cast(Any, storage).cpu(), str(storage.device))
        self.sources.append(MemoryRange(storage.data_ptr(), storage.nbytes(), storage))
        return rebuild_storage, (_STAND_IN,)

    def _reduce_typed_storage(self, storage: TypedStorage) -> Any:
        return rebuild_typed_storage, (untyped_storage(storage), storage.dtype)

    def _reduce_span(self, span: _Span) -> Any:
        memory = span.memory
        self.sources.append(MemoryRange(address_of(memory), memory.nbytes, memory))
        return rebuild_storage, (_STAND_IN,)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype
        plain = dtype.kind in _PLAIN_KINDS and dtype.metadata is None
        if dtype.hasobject or not (plain or dtype.kind == "V"):
            return NotImplemented
        order = "F" if array.flags.fnc else "C"
        if not array.flags.forc:
            array = np.ascontiguousarray(array)
        alignment = max(dtype.alignment, WORD)
        self.sources.append(MemoryRange(address_of(array), array.nbytes, array, alignment))
        return rebuild_array, (_STAND_IN, dtype.str if plain else dtype, array.shape, order)


def _take_buffer(sources: list[MemoryRange], buffer: pickle.PickleBuffer) -> None:
    if buffer is not _STAND_IN:
        memory = np.frombuffer(buffer.raw(), np.uint8)
        sources.append(MemoryRange(address_of(memory), memory.nbytes, memory))


def rebuild_storage(memory: memoryview) -> torch.UntypedStorage:
    return storage_over(np.frombuffer(memory, np.uint8))


def rebuild_storage_on(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    return tensor_over(storage, torch.uint8, (storage.nbytes(),)).to(device).untyped_storage()


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return typed_storage(storage, dtype)


def rebuild_tensor(
    storage: torch.UntypedStorage, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    return tensor_over(storage, _DTYPES[dtype], shape, stride, offset)


def rebuild_array(memory: memoryview, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, order=order)
    return array


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether storage, dtype, shape, strides and offset describe a tensor of the CPU completely."""
    return not (
        tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.requires_grad
        or tensor.is_nested
        or tensor.is_quantized
        # torch's own reduction for shared memory drops these two flags, so that `x.conj()` arrives as `x`.
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.__dict__
    )


def _refuse_graph(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise TypeError("it requires grad and is not a leaf, and gradients do not flow from one process to another")


def _narrow(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> tuple[Any, int]:
    """Return (part of the storage to send with `tensor`, the tensor's offset in that part)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.itemsize if tensor.numel() else 0
    if nbytes > storage.nbytes() * _SPAN_SHARE or storage.nbytes() - nbytes < _SPAN_SLACK_BYTES:
        return storage, offset
    start = offset * tensor.itemsize if nbytes else 0
    return _Span(memory_of(storage, start, nbytes)), 0


_REDUCERS: dict[type, Callable[[PayloadPickler, Any], Any]] = {
    torch.Tensor: PayloadPickler._reduce_tensor,
    torch.UntypedStorage: PayloadPickler._reduce_storage,
    TypedStorage: PayloadPickler._reduce_typed_storage,
    _Span: PayloadPickler._reduce_span,
    np.ndarray: PayloadPickler._reduce_array,
}


def _takes_bytes_apart() -> bool:
    """Self-test: return whether this Python writes big bytes objects as `_Stream` expects, and they can be decoded."""
    big = bytes(_APART_BYTES)
    given = [big, "text", pickle.FRAME + bytes(8) + big, big]
    pickler = PayloadPickler()
    try:
        pickler.dump(given)
        buffers = [source.view() for source in pickler.sources]
        found = pickle.loads(b"".join(pickler.chunks), buffers=buffers)
    except Exception:
        return False
    return bool(found == given and found[0] is found[3] and [source.key for source in pickler.sources] == [id(big)])


_new_stream: Callable[[], _Stream | _PlainStream] = _Stream
# The format of pickles is documented; how they are split into calls of `write` is not, and may change.
if not _takes_bytes_apart():
    _new_stream = _PlainStream
    TRANSPORT.warning(
        "this Python writes pickles in an unexpected form: big bytes objects are sent inside them, "
        "which takes one copy more"
    )


#: Maximum objects that are pickled on trial in the search for the culprit.
_MAX_TRIALS = 10_000
_MAX_DEPTH = 50


def explain(obj: Any, error: Exception, *, name: str) -> NotPicklableError:
    """Return the error for an object that cannot be pickled. It names the part at fault, as a path from `name`."""
    path, culprit, reason = _find_culprit(obj, error, name, lambda part: PayloadPickler().dump(part))
    return _error_of(path, culprit, reason, _advice(culprit))


def explain_loading(
    loads: Mapping[str, Any], error: Exception, *, dump: Callable[[Any], object], workers: str
) -> NotPicklableError:
    """Return the error for objects that cannot be sent to workers. It names the part at fault, as in `explain`.

    loads: the objects, by their names in the error.
    error: the error of `dump` for all objects together.
    dump: pickles an object; also called for single objects and for their parts.
    workers: owner of the workers in the error's text, such as "a platform".
    """
    for name, obj in loads.items():
        failure = _failure_of(obj, dump)
        if failure is not None:
            path, culprit, reason = _find_culprit(obj, failure, name, dump)
            return _error_of(path, culprit, reason, _loading_advice(culprit, workers, reason))
    return _error_of(" and ".join(loads), loads, error, _loading_advice(loads, workers, error))


def _error_of(path: str, culprit: Any, reason: Exception, advice: str) -> NotPicklableError:
    kind = type(culprit)
    return NotPicklableError(
        f"{path} of type {getattr(kind, '__module__', '')}.{kind.__qualname__} cannot be pickled, so it cannot be sent "
        f"to another process: {reason}. {advice}"
    )


def _find_culprit(obj: Any, error: Exception, path: str, dump: Callable[[Any], object]) -> tuple[str, Any, Exception]:
    """Return (path, part, error) of the innermost part that cannot be pickled, although all of its own parts can."""
    trials = 0
    above: set[int] = set()
    for _ in range(_MAX_DEPTH):
        above.add(id(obj))
        for step, part in children_of(obj):
            trials += 1
            if trials > _MAX_TRIALS:
                return path, obj, error
            if id(part) in above:
                continue
            failure = _failure_of(part, dump)
            if failure is not None:
                path, obj, error = path + step, part, failure
                break
        else:
            break
    return path, obj, error


def _failure_of(obj: Any, dump: Callable[[Any], object]) -> Exception | None:
    try:
        dump(obj)
    except Exception as error:
        return error
    return None


def children_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield (suffix of the path, part) for items and attributes, such as ("[0]", value) or (".field", value)."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, tuple) and isinstance(fields := working(obj, "_fields"), tuple):
        yield from ((f".{field}", value) for field, value in zip(fields, obj, strict=False))
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    if not isinstance(obj, type | types.FunctionType | types.ModuleType):
        attributes: dict[str, Any] = working(obj, "__dict__", {})
        yield from ((f".{attribute}", value) for attribute, value in attributes.items())


def _advice(culprit: Any) -> str:
    if isinstance(culprit, torch.Tensor):
        return "Call .detach() on it first, or .to_dense() if its layout is the reason"
    if isinstance(culprit, type | types.FunctionType | types.MethodType):
        return "Define it at the top level of a module that the training process can import"
    if isinstance(culprit, io.IOBase | types.GeneratorType):
        return "Return what is read from it instead"
    return (
        "Return tensors, arrays, numbers, strings or containers of them, or give the class a __getstate__ "
        "that leaves out what belongs to one process"
    )


def _loading_advice(culprit: Any, workers: str, reason: Exception) -> str:
    where = f"The workers of {workers} are not forked from this process"
    if isinstance(reason, RecursionError) or isinstance(reason.__cause__, RecursionError):
        return (
            f"{where}: its classes, functions or objects refer to each other in a chain that is too long for pickle; "
            "define the classes and functions in a module next to the script, which is sent as a file, or raise "
            "sys.setrecursionlimit"
        )
    if isinstance(culprit, types.FunctionType | types.MethodType):
        return f"{where}: make inside the function what it takes along from where it is defined"
    return f"{where}: make it where the first sample is read, and give the class a __getstate__ that leaves it out"
