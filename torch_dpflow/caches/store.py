"""Thread-safe store of samples within a budget, where simultaneous misses of one sample load it once.

Samples are measured and copied with all that they contain: lists, tuples, dicts, sets, attributes of objects, tensors,
numpy arrays, Pillow images. An object that is referenced twice counts once, and is one object in the copy too.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from torch_dpflow._core.checks import working
from torch_dpflow._core.threads import RunningLoad, RunningLoads, fail
from torch_dpflow.caches.policy import Job, Policy
from torch_dpflow.errors import OptionTypeError, UsageError
from torch_dpflow.lookahead import Lookahead

_UNCHANGEABLE = frozenset(
    {int, float, complex, bool, str, bytes, range, type(None), type(...), torch.dtype, torch.device}
)

#: Objects of the program that a sample may refer to, but that are not part of it.
_PROGRAM = (type, FunctionType, BuiltinFunctionType, ModuleType)

#: Bytes that Pillow takes for a pixel; in other modes 4, "RGB" among them.
_BYTES_PER_PIXEL = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}

#: The components of sparse tensors.
_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def measure(sample: object) -> int:
    """Return the bytes of `sample` and of all objects in it. For a view of a tensor or array, only its part counts."""
    total = 0
    seen: dict[int, object] = {}
    waiting = [sample]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen and not isinstance(part, _PROGRAM):
            seen[id(part)] = part
            total += _own_size(part)
            waiting.extend(_parts(part))
    return total


def duplicate(sample: Any) -> Any:
    """Return a deep copy of `sample`; tensors stay on their device. Raises OptionTypeError if it cannot be copied."""
    try:
        return _duplicate(sample, {})
    except (TypeError, ValueError, RuntimeError, copy.Error) as error:
        raise OptionTypeError(
            f"a sample of type {type(sample).__name__} cannot be copied ({error}); "
            "pass copy=False if nothing writes to the samples that the cache returns"
        ) from error


def _own_size(part: Any) -> int:
    """Return the bytes of one object without those that it refers to."""
    size = sys.getsizeof(part)
    if isinstance(part, torch.Tensor):
        components = _COMPONENTS.get(part.layout)
        tensors = [part] if components is None else [getattr(part, name)() for name in components]
        size += sum(tensor.nbytes for tensor in tensors)
    elif isinstance(part, memoryview) or (isinstance(part, np.ndarray) and part.base is not None):
        size += part.nbytes  # sys.getsizeof leaves out the buffer of a view
    elif _is_image(part):
        size += part.width * part.height * _BYTES_PER_PIXEL.get(part.mode, 4)
    return size


def _parts(part: Any) -> Iterable[object]:
    """Return the objects that one object refers to."""
    if isinstance(part, (str, bytes, bytearray, memoryview, torch.Tensor)) or _is_image(part):
        return ()
    if isinstance(part, np.ndarray):
        return part.flat if part.dtype.hasobject and part.dtype.names is None else ()
    parts: list[object] = []
    if isinstance(part, Mapping):
        parts += part.keys()
        parts += part.values()
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        parts += part
    parts += working(part, "__dict__", {}).values()
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += (value for name in names if (value := working(part, name)) is not None)
    return parts


def _duplicate(part: Any, memo: dict[int, Any]) -> Any:
    kind = type(part)
    if kind in _UNCHANGEABLE:
        return part
    if id(part) in memo:
        return memo[id(part)]
    result: Any
    if kind is torch.Tensor:
        result = part.detach().clone().requires_grad_(part.requires_grad)
    elif kind is np.ndarray and not part.dtype.hasobject:
        result = part.copy(order="K")
    elif _is_image(part):
        result = part.copy()
    elif kind is NamedSample:
        result = NamedSample(part.index, _duplicate(part.sample, memo))
    elif kind in (list, tuple):
        result = kind(map(partial(_duplicate, memo=memo), part))
    elif kind is dict:
        result = {key: _duplicate(value, memo) for key, value in part.items()}
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        result = kind(*map(partial(_duplicate, memo=memo), part))
    else:
        return copy.deepcopy(part, memo)
    memo[id(part)] = result
    return result


def _is_image(part: object) -> bool:
    # Pillow is optional: if it was not imported, nothing is an image.
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(part, pillow.Image)


@dataclass(frozen=True, slots=True)
class NamedSample:
    """Sample, with the index by which it was loaded. Readers check it, because a key is reused for other indices."""

    index: Any
    sample: Any


#: The name of the one job that reads a separate store.
_JOB: Job = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counts of a cache since the cache was made or cleared. While no load runs, `loads + errors == misses`."""

    #: reads answered from memory, or by a load that was running already
    hits: int
    #: samples that had to be loaded
    misses: int
    #: samples whose load succeeded, and samples whose load raised an error
    loads: int
    errors: int
    #: samples evicted; not kept because the others were worth more; not kept because they exceed the whole capacity
    evicted: int
    bypassed: int
    refused: int
    #: samples held now, and their measured bytes
    items: int
    bytes: int
    #: the capacity, in samples or in bytes; the other one is None
    max_items: int | None
    max_bytes: int | None

    @property
    def hit_rate(self) -> float:
        """Hits per sample read; 0.0 before the first read."""
        return self.hits / max(1, self.hits + self.misses)


class SampleStore:
    """Store of the samples that a policy keeps, by key. Thread-safe.

    No lock is held while samples are loaded, measured or copied, or a sampler is polled. So a load can read samples of
    this store. If it reads the sample that it loads, directly or through other threads, that read loads the sample
    again, and does not keep it. If a load fails, every thread that waited for it raises the error, and the next reader
    loads again. A forked child has a separate store with the same samples, or an empty one if a thread was using the
    store during the fork.

    Args:
        make_policy: returns a new policy.
        copies: whether to store a copy of each loaded sample, and to return copies of stored samples.
        before_read: function that is called before reads with their number, and returns a new lookahead or None.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        *,
        copies: bool,
        before_read: Callable[[int], Lookahead | None] | None = None,
    ) -> None:
        self._make_policy = make_policy
        self._copies = copies
        self._before_read = before_read
        self._lock = threading.Lock()
        #: the load that each thread waits for
        self._waits: dict[int, RunningLoad] = {}
        self._empty()
        _STORES.add(self)

    def get(self, key: int, load: Callable[[], Any]) -> Any:
        """Return the sample of `key`; call `load` if it is not held and no other thread is loading it."""
        lookahead = self._poll(1)
        with self._lock:
            self._hint(lookahead)
            if self._policy.access(key, _JOB):
                sample, future, joined = self._samples[key], None, False
            else:
                sample, (future, joined) = None, self._start_or_join(key)
        if future is None:
            return self._copy(sample)
        if joined:
            return self._wait(key, future, load)
        return self._load([key], [future], lambda: [load()])[0]

    def get_many(self, keys: Sequence[int], load: Callable[[list[int]], Sequence[Any]]) -> list[Any]:
        """Return the samples of `keys`, in order.

        load: called with positions in `keys` of samples neither held nor being loaded; returns these samples.
        """
        found: list[Any] = [None] * len(keys)
        own: list[int] = []
        running: dict[int, RunningLoad] = {}
        lookahead = self._poll(len(keys))
        with self._lock:
            self._hint(lookahead)
            held = self._policy.access_many(np.asarray(keys, dtype=np.int64), _JOB).tolist()
            for place, (key, hit) in enumerate(zip(keys, held)):
                if hit:
                    found[place] = self._samples[key]
                    continue
                running[place], joined = self._start_or_join(key)
                if not joined:
                    own.append(place)
        for place, hit in enumerate(held):
            if hit:
                found[place] = self._copy(found[place])
        if own:
            loaded = self._load([keys[k] for k in own], [running.pop(k) for k in own], lambda: load(own))
            for place, sample in zip(own, loaded):
                found[place] = sample
        # After its own loads, so that two readers of each other's loads do not wait forever.
        for place, future in running.items():
            found[place] = self._wait(keys[place], future, partial(_load_one, load, place))
        return found

    def held(self) -> set[int]:
        """Return the keys of the samples that are held."""
        with self._lock:
            return set(self._samples)

    def clear(self) -> None:
        """Drop all samples and counts; samples of running loads are not kept."""
        with self._lock:
            self._empty()

    def statistics(self) -> CacheStatistics:
        """Return the counts of reads and loads since the store was made or cleared."""
        with self._lock:
            policy, counted = self._policy, self._policy.statistics()
            return CacheStatistics(
                hits=counted.hits + self._joined,
                misses=counted.misses - self._joined - self._abandoned,
                loads=self._loads,
                errors=self._errors,
                evicted=counted.evicted,
                bypassed=counted.bypassed,
                refused=counted.refused,
                items=counted.items,
                bytes=counted.bytes,
                max_items=policy.max_items,
                max_bytes=policy.max_bytes,
            )

    def _empty(self) -> None:
        self._policy = self._make_policy()
        self._samples: dict[int, Any] = {}
        self._running = RunningLoads()
        self._loads = self._errors = 0
        #: accesses that the policy counted as misses although they joined a load, or were repeated because the load
        #: that they had joined was interrupted
        self._joined = self._abandoned = 0

    def _hint(self, lookahead: Lookahead | None) -> None:
        if lookahead is not None:
            self._policy.hint(_JOB, lookahead)

    def _start_or_join(self, key: int) -> tuple[RunningLoad, bool]:
        future, joined = self._running.start_or_join(key)
        self._joined += joined
        return future, joined

    def _waits_for(self, thread: int, future: RunningLoad) -> bool:
        """Return whether a load waits for `thread`: the thread runs it, or another load that this load waits for."""
        awaited: RunningLoad | None = future
        while awaited is not None and not awaited.done():
            if awaited.thread == thread:
                return True
            awaited = self._waits.get(awaited.thread)
        return False

    def _abandon(self) -> None:
        """Record that a thread no longer waits for a load that it had joined."""
        self._joined -= 1
        self._abandoned += 1

    def _keep(self, keys: list[int], running: list[RunningLoad], kept: list[Any], sizes: list[int]) -> None:
        """Offer loaded samples to the policy, unless the store was cleared meanwhile."""
        current = [self._running.finish(key, future) for key, future in zip(keys, running)]
        if all(current):
            gone: Sequence[int]
            if len(keys) == 1:
                gone = self._policy.admit(keys[0], sizes[0])
            else:
                gone = self._policy.admit_many(np.array(keys), np.array(sizes)).tolist()
            self._samples.update(zip(keys, kept))
            for key in gone:
                del self._samples[key]
        self._loads += sum(current)

    def _poll(self, count: int) -> Lookahead | None:
        return None if self._before_read is None else self._before_read(count)

    def _copy(self, sample: Any) -> Any:
        return duplicate(sample) if self._copies else sample

    def _load(self, keys: list[int], running: list[RunningLoad], load: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Load samples for this thread and for all that wait for them."""
        try:
            loaded = load()
            if len(loaded) != len(keys):
                raise UsageError(
                    f"the dataset's __getitems__ returned {len(loaded)} samples for {len(keys)} indices; "
                    "it must return one for each, in order"
                )
            kept = [self._copy(sample) for sample in loaded]
            sizes = [measure(sample) for sample in kept]
        except BaseException as error:
            self._fail(keys, running, error)
            raise
        with self._lock:
            self._keep(keys, running, kept, sizes)
        for future, sample in zip(running, kept):
            future.set_result(sample)
        return loaded

    def _fail(self, keys: list[int], running: list[RunningLoad], error: BaseException) -> None:
        with self._lock:
            self._errors += sum([self._running.finish(key, future) for key, future in zip(keys, running)])
        fail(running, error)

    def _wait(self, key: int, future: RunningLoad, load: Callable[[], Any]) -> Any:
        thread = threading.get_ident()
        with self._lock:
            is_cycle = self._waits_for(thread, future)
            if is_cycle:
                self._abandon()
            else:
                self._waits[thread] = future
        if is_cycle:
            return self._copy(load())
        try:
            return self._copy(future.result())
        except CancelledError:
            with self._lock:
                self._abandon()
            return self.get(key, load)
        finally:
            with self._lock:
                self._waits.pop(thread, None)

    def _after_fork(self) -> None:
        """Reset in the child, where the threads that held the lock or were loading do not exist."""
        interrupted = self._lock.locked()
        self._lock = threading.Lock()
        self._abandoned += len(self._running)
        self._running, self._waits = RunningLoads(), {}
        if interrupted:
            self._empty()


def _load_one(load: Callable[[list[int]], Sequence[Any]], place: int) -> Any:
    return load([place])[0]


_STORES: weakref.WeakSet[SampleStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _STORES:
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
