"""Digests of large containers, arrays and tensors, which are the same for equal values in every process."""

from __future__ import annotations

import contextvars
import copyreg
import enum
import functools
import hashlib
import inspect
import marshal
import operator
import pickle
import queue
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from torch_dpflow.remote.shipping.modules import module_of

#: Plain types: the pickle of such a value follows from the value alone.
ATOMS = frozenset((types.NoneType, bool, int, float, complex, str, bytes, bytearray, type(...), type(NotImplemented)))
#: Types of the standard library that count by their name, with the types that it derives from them: loggers are named
#: after modules, locks differ by who holds them, and executors and threads hold none of the user's values.
_HARMLESS = {
    "_thread": ("lock", "RLock"),
    "concurrent.futures._base": ("Executor",),
    "ctypes": ("CDLL",),
    "logging": ("Logger", "Handler"),
    "multiprocessing.synchronize": ("SemLock",),
    "random": ("SystemRandom",),
    "threading": ("Thread",),
}
#: Types of random generators, and the name of torch's type, because torch may not be imported.
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
TORCH_GENERATOR = "torch._C", "Generator"
#: Types of paths that have no attributes.
PATHS = frozenset(map(type, (Path(), PurePosixPath(), PureWindowsPath())))
_CONTAINERS = frozenset((list, tuple, dict))
#: Plain values that are changed in place.
_CHANGED = frozenset((list, dict, bytearray))
#: Plain values that are not.
_UNCHANGED = ATOMS - {bytearray}
#: From this many elements a container is digested as a whole.
_MIN_BULK = 17
#: Levels of containers within each other that are digested as a whole; pickle recurses.
_MAX_LEVELS = 4
#: Elements that are pickled at once, so that not all of their bytes are held.
_PIECE = 1 << 18
#: Arrays that are joined to be digested, and the maximum bytes of one.
_MAX_JOINED, _MAX_JOINED_BYTES = 256, 1 << 16
#: Kinds of numpy dtype whose memory is their value.
_PLAIN_KINDS = frozenset("biufcSUmM")


@functools.lru_cache(maxsize=4096)
def is_harmless(kind: type) -> bool:
    """Return whether objects of this type, such as locks, loggers and threads, are compared only by their type."""
    return _is_pythons(kind) and any(one.__qualname__ in _HARMLESS.get(module_of(one), ()) for one in kind.__mro__)


def _is_pythons(kind: type) -> bool:
    return module_of(kind).partition(".")[0] in sys.stdlib_module_names


_MUTABLE = (list, dict, set, bytearray, deque, types.SimpleNamespace, *GENERATORS)
_NO_OBJECTS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, enum.Enum)


def is_mutable(value: Any) -> bool:
    """Return whether one object at two places counts as different from two equal ones: True for a list, not a str."""
    kind = type(value)  # an object can raise when it is asked for its `__class__` or `__dict__`
    if issubclass(kind, _MUTABLE) or kind is object:
        return True
    if issubclass(kind, _NO_OBJECTS) or _is_pythons(kind):
        return False
    return kind.__dictoffset__ != 0 or kind.__name__ in ("ndarray", "Tensor", "Generator")


def repeated(values: Collection[Any]) -> dict[int, int]:
    """Return {position of an `is_mutable` object that occurs earlier too: position of its first occurrence}."""
    if len(set(map(id, values))) == len(values):
        return {}
    if not any(map(is_mutable, {type(one): one for one in values}.values())):
        return {}
    first: dict[int, int] = {}
    found = ((at, first.setdefault(id(one), at)) for at, one in enumerate(values) if is_mutable(one))
    return {at: before for at, before in found if at != before}


def _state_of(obj: types.GeneratorType[Any, Any, Any]) -> Any:
    """Return the parts of a generator. Raises TypeError if the generator has begun."""
    if inspect.getgeneratorstate(obj) != inspect.GEN_CREATED:
        raise TypeError("a generator that has begun")
    return obj.gi_code, dict(inspect.getgeneratorlocals(obj))  # since Python 3.13 a view, which pickle refuses


def _value_of(obj: contextvars.ContextVar[Any]) -> Any:
    """Return (name of a context variable, its value here or its default)."""
    try:
        return obj.name, obj.get()
    except LookupError:
        return (obj.name,)


def _entries_of(obj: queue.SimpleQueue[Any]) -> tuple[()]:
    """Return the entries of an empty queue. Raises TypeError if the queue has entries."""
    if obj.qsize():
        raise TypeError("a queue with entries")
    return ()


#: Functions that return the content of objects that pickle refuses, by type.
HIDING: dict[type, Callable[[Any], Any]] = {
    contextvars.ContextVar: _value_of,
    queue.SimpleQueue: _entries_of,
    types.GeneratorType: _state_of,
    weakref.ref: lambda obj: obj(),
}


class Bulk:
    """Cache of the digests of large containers of plain values, for a second `Walk` over the same objects."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, bytes | None]] = {}

    def of(self, obj: Any) -> bytes | None:
        """Return the digest of a container of plain values; None if it must be digested element by element."""
        if len(obj) < _MIN_BULK:
            return _plain_bytes(obj)
        if id(obj) not in self._kept:
            self._kept[id(obj)] = (obj, _plain_bytes(obj))
        return self._kept[id(obj)][1]


def _is_plain(obj: Any) -> bool:
    """Return whether a container contains only plain values, in few levels of containers, none of which occurs twice.

    Keys of mappings are not checked, because they cannot be changed, and `_PlainPickler` refuses keys that are not
    plain.
    """
    level = [*(obj.values() if type(obj) is dict else obj)]
    seen: set[int] = set()
    for _ in range(_MAX_LEVELS):
        kinds = set(map(type, level))
        if kinds <= _UNCHANGED:
            return True
        if not kinds <= ATOMS | _CONTAINERS:
            return False
        if kinds & ATOMS:
            level = [one for one in level if type(one) in _CONTAINERS or type(one) is bytearray]
            kinds -= _UNCHANGED
        if kinds & _CHANGED and max(map(sys.getrefcount, level)) > _REFERENCES:
            changed = [one for one in level if type(one) in _CHANGED]
            here = set(map(id, changed))
            if len(here) < len(changed) or not seen.isdisjoint(here):
                return False
            seen |= here
        if kinds == {dict}:
            level = [*chain.from_iterable(map(dict.values, level))]
        elif dict in kinds or bytearray in kinds:
            held = (one.values() if type(one) is dict else one for one in level if type(one) is not bytearray)
            level = [*chain.from_iterable(held)]
        else:
            level = [*chain.from_iterable(level)]
    return False


#: References to an object that is in one container and in the list of a level: one that is in two has more.
_REFERENCES = max(map(sys.getrefcount, [*(_one := [[]])]))  # type: ignore[var-annotated]


class _PlainPickler(pickle.Pickler):
    """Pickler of plain values without a memo, so that the identity of equal values does not matter.

    Raises TypeError for all other values, including sets, which this protocol reduces to their type and a list.
    """

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__(types.SimpleNamespace(write=write), protocol=3)
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in ATOMS or obj is bytearray or obj is complex:
            return NotImplemented
        raise TypeError(f"{type(obj).__qualname__} is no plain value")


def _plain_bytes(obj: Any) -> bytes | None:
    """Return the digest of a container of plain values; None if it contains other values, or a container twice."""
    if (numbers := _numbers(obj)) is not None:
        return digest(numbers)
    if not _is_plain(obj) or (type(obj) is not list and len(obj) > _PIECE):
        return None
    found = hashlib.sha256()
    pickler = _PlainPickler(found.update)
    try:
        if type(obj) is list and len(obj) > _PIECE:
            for begin in range(0, len(obj), _PIECE):
                pickler.dump(obj[begin : begin + _PIECE])
        else:
            pickler.dump(obj)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return found.digest()[:16]


def _numbers(obj: Any) -> bytes | None:
    """Return a long list of small integers, or of floats, as bytes; None for other lists.

    All entries have the same number of bytes and begin with the mark of their type, so nothing else is in the list.
    """
    if type(obj) is not list or len(obj) < _MIN_BULK or not type(obj[0]) is type(obj[-1]) in _MARKS:
        return None
    mark, size = _MARKS[type(obj[0])]
    try:
        found = marshal.dumps(obj, 2)
    except ValueError:  # it holds other objects
        return None
    return found if len(found) == 5 + size * len(obj) == 5 + size * found[5::size].count(mark) else None


#: By type, how marshal begins a value, and how many bytes it takes.
_MARKS = {int: (b"i", 5), float: (b"g", 9)}


def set_bytes(obj: Any) -> bytes | None:
    """Return a digest of a set of plain values in any order; None if it must be digested element by element."""
    kinds = set(map(type, obj))
    if kinds == {int}:
        with suppress(OverflowError):
            numbers = np.fromiter(obj, np.int64, len(obj))
            numbers.sort()
            return digest(numbers.data)
    if len(kinds) == 1 and kinds <= {str, bytes, int}:
        return _plain_bytes(sorted(obj))
    pickled: list[bytes] = []
    pickler = _PlainPickler(pickled.append)
    try:
        deque(map(pickler.dump, obj), maxlen=0)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    # A long text is written in pieces.
    return digest(b"".join(sorted(pickled))) if len(pickled) == len(obj) else None


class Column(NamedTuple):
    """Values of one attribute of all objects in a container."""

    values: list[Any]
    #: Number of containers that were taken apart to reach it, which is limited because objects can form a circle.
    level: int


class Columns(NamedTuple):
    """Content of a long container of similar objects, attribute by attribute."""

    label: bytes
    kind: type | None
    columns: list[Column]


def columns_of(obj: Any, level: int = 0) -> Columns | None:
    """Return the columns of a long container of similar tuples, lists, dicts, objects or arrays; None for others.

    All elements are of one type; tuples and lists have one length, dicts and objects the same names. The class of
    objects must not define how to pickle them. Arrays have no columns: their content is in the label.
    """
    if len(obj) < _MIN_BULK or level == _MAX_LEVELS:
        return None
    kinds = set(map(type, obj))
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is np.ndarray or _is_tensor(kind):
        return _column_of_memory(obj, kind)
    if kind is tuple or kind is list:
        lengths = set(map(len, obj))
        if len(lengths) != 1 or not 0 < (width := lengths.pop()) <= _MIN_BULK:
            return None
        return Columns(
            f"{kind.__name__} {width}".encode(), None, [Column(list(one), level + 1) for one in zip(*obj, strict=True)]
        )
    if kind is dict:
        return _by_name(b"dict", None, obj, level)
    if not _is_simple(kind):
        return None
    states = [vars(one) for one in obj]
    if any(isinstance(value, GENERATORS) for value in states[0].values()):
        return None
    return _by_name(b"object", kind, states, level)


def _by_name(label: bytes, kind: type | None, states: Any, level: int) -> Columns | None:
    names = list(states[0])
    if not names or len(names) > 64 or not all(type(name) is str for name in names):
        return None
    if not all(list(state) == names for state in states):
        return None
    columns = [Column([state[name] for state in states], level + 1) for name in names]
    return Columns(label + b" " + repr(names).encode(errors="replace"), kind, columns)


@functools.lru_cache(maxsize=4096)
def _is_simple(kind: type) -> bool:
    """Return whether objects of a class are pickled only as their `__dict__`."""
    if kind in copyreg.dispatch_table or issubclass(kind, type | types.FunctionType | types.ModuleType):
        return False
    own = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__", "__reduce_by_value__")
    for base in kind.__mro__[:-1]:
        if any(name in vars(base) for name in own):
            return False
        if any(isinstance(value, functools.cached_property) for value in vars(base).values()):
            return False
    return is_bare(kind)


def is_bare(kind: type) -> bool:
    """Return whether objects of a class consist only of their `__dict__`."""
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    return kind.__basicsize__ <= object.__basicsize__ + 2 * 8 and kind.__itemsize__ == 0 and kind.__dictoffset__ != 0


def _is_tensor(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and kind is torch.Tensor


def _column_of_memory(obj: Any, kind: type) -> Columns | None:
    found = hashlib.sha256()
    first = obj[0]
    if kind is np.ndarray and first.ndim and first.dtype.kind in _PLAIN_KINDS and _are_alike_and_small(obj):
        found.update(f"{first.dtype.str} {first.shape}".encode())
        for begin in range(0, len(obj), _MAX_JOINED):
            found.update(np.concatenate(obj[begin : begin + _MAX_JOINED]).reshape(-1).view(np.uint8).data)
        return Columns(b"joined" + found.digest()[:16], kind, [])
    for one in obj:
        content = memory_of(one)
        if content is None or not isinstance(content[1], bytes):
            return None
        found.update(len(content[0]).to_bytes(4, "little") + content[0] + content[1])
    return Columns(found.digest()[:16], kind, [])


def _are_alike_and_small(arrays: Any) -> bool:
    try:
        alike = set(map(operator.attrgetter("shape", "dtype", "dtype.metadata"), arrays))
    except TypeError:  # metadata
        return False
    return len(alike) == 1 and 0 < arrays[0].nbytes <= _MAX_JOINED_BYTES


class Memory(NamedTuple):
    """Content of an array or tensor: a label, the digest of its memory or else its values, and a text for messages."""

    label: bytes
    values: Any
    text: str


def memory_of(obj: Any) -> Memory | None:
    """Return the content of an array, buffer, tensor or storage; None for others, such as sparse tensors."""
    kind = type(obj)
    if kind is np.ndarray or kind is np.memmap:
        return _array(obj)
    if kind is pickle.PickleBuffer:
        return Memory(b"buffer", digest(memoryview(obj.raw())), "bytes")
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if kind is torch.UntypedStorage:
        return Memory(b"storage", _storage_bytes(torch, obj), "storage")
    if kind is torch.storage.TypedStorage:
        from torch_dpflow._core.torch_private import untyped_storage

        return Memory(f"storage {obj.dtype}".encode(), _storage_bytes(torch, untyped_storage(obj)), "storage")
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _tensor(torch, obj, kind)
    return None


def digest(memory: Any) -> bytes:
    return hashlib.sha256(memory).digest()[:16]


def _array(array: Any) -> Memory | None:
    dtype = array.dtype
    label = f"{type(array).__name__} {dtype.str} {array.shape}".encode()
    text = f"{dtype} array {array.shape}"[:60]
    if array.ndim == 0 and dtype.kind in _PLAIN_KINDS:
        text = f"array({array.item()!r})"[:60]
    if dtype.names is not None:  # gaps between fields hold anything
        fields = [(name, array[name]) for name in dtype.names]
        return Memory(label + repr(dtype.descr if not dtype.hasobject else dtype.names).encode(), fields, text)
    if dtype.kind not in _PLAIN_KINDS and not (dtype.kind == "V" and not dtype.hasobject):
        # Objects and strings of any length: memory holds addresses.
        return Memory(label + repr(dtype).encode(), array.ravel().tolist(), text)
    if not dtype.itemsize:
        return Memory(label, b"", text)
    metadata = b"" if dtype.metadata is None else repr(sorted(dict(dtype.metadata).items())).encode()
    return Memory(label + metadata, digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data), text)


def _tensor(torch: types.ModuleType, tensor: Any, kind: type) -> Memory | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return None
    if vars(tensor):
        return None
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    label = f"{kind.__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type} {tensor.requires_grad}"
    text = f"{tensor.dtype} tensor {tuple(tensor.shape)}"[:60]
    return Memory(label.encode(), digest(values.view(torch.uint8).numpy().data), text)


def _storage_bytes(torch: types.ModuleType, storage: Any) -> bytes:
    values = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    return digest(values.numpy().data)
