"""Nodes for pipelines of `torchdata.nodes`: the loader as a source, and a mapper on the loader's workers.

`Batcher`, `Prefetcher`, `PinMemory` and `Loader` of torchdata can read from them. Needs the extra `stateful`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch_dpflow._core.checks import check_int, check_type
from torch_dpflow.epoch.own_state import Unsaved
from torch_dpflow.errors import MissingExtraError, NotPicklableError, StateError, WorkerError
from torch_dpflow.loader.loader import DPFlowDataLoader
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers.stream_items import MappedItems, SourceFailed, StreamItem, as_mapped

try:
    from torchdata.nodes import BaseNode
except ImportError as error:
    raise MissingExtraError(
        "torch_dpflow.nodes needs torchdata, which is not installed: pip install 'torch_dpflow[stateful]'"
    ) from error

if TYPE_CHECKING:
    from torch_dpflow.remote.launchers.contract import PlatformSpec

__all__ = ["DPFlowNode", "Mapper"]

T = TypeVar("T")
#: Returned by a source's `draw` at its end.
_END: Any = object()


class DPFlowNode(BaseNode[T]):  # type: ignore[misc]
    """A `DPFlowDataLoader` as a source: each `reset()` begins an iteration of the loader.

    The state is the loader's state after the latest batch that `next()` returned. A state that was taken at the end of
    an epoch restores that end; the `reset()` after it begins the following epoch.

    Methods can be called from several threads, as by a `Prefetcher`; they run one after the other.

    Args:
        loader: the loader; do not iterate it elsewhere while the node uses it.

    Raises OptionTypeError if `loader` is not a DPFlowDataLoader.
    """

    def __init__(self, loader: DPFlowDataLoader[Any]) -> None:
        super().__init__()
        check_type("loader", loader, DPFlowDataLoader, "a torch_dpflow.DPFlowDataLoader")
        #: The loader; its `explain()` says what limits its speed.
        self.loader = loader
        self._lock = threading.RLock()
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin an epoch, or continue from a state that `state_dict()` returned.

        Raises:
            StateError: the state is damaged, or does not fit the loader.
            The errors of the loader's `load_state_dict` and `iter`.
        """
        with self._lock:
            super().reset(initial_state)
            self._iterator = None  # before new workers start, so that both are not there at once
            if initial_state is None:
                self._ended = False
            else:
                if not isinstance(initial_state, dict) or set(initial_state) != {"loader", "ended"}:
                    raise StateError(f"{initial_state!r:.200} is not a state of {type(self).__name__}")
                self.loader.load_state_dict(initial_state["loader"])
                self._ended = bool(initial_state["ended"])
            if not self._ended:
                self._iterator = iter(self.loader)

    def next(self) -> T:
        """Return the next batch. Raises StopIteration at an epoch's end, WorkerError after `shutdown`, among others."""
        with self._lock:
            if self._ended:
                raise StopIteration
            if self._iterator is None:
                raise WorkerError(f"this {type(self).__name__} was shut down, or has failed to start; reset() it")
            try:
                return self._take(self._iterator)
            except StopIteration:
                self._ended, self._iterator = True, None
                raise

    def get_state(self) -> dict[str, Any]:
        """Return the state after the latest batch. Raises StateError as the loader's `state_dict` does."""
        with self._lock:
            return {"loader": self.loader.state_dict(), "ended": self._ended}

    def shutdown(self) -> None:
        """End the workers. `reset()` starts them again."""
        with self._lock:
            # A loader keeps its iterator itself if workers stay. Iterators have a length, so no `or`.
            kept, self.loader._iterator = self.loader._iterator, None
            iterator, self._iterator = self._iterator, None
            end = getattr(kept if iterator is None else iterator, "_shutdown_workers", None)
            if end is not None:
                end()

    def _take(self, iterator: Iterator[Any]) -> T:
        batch: T = next(iterator)
        return batch


class Mapper(DPFlowNode[T]):
    """Node that maps the items of a source by a function, on the loader's workers.

    Idle workers take over waiting items of busy ones. A worker that dies is replaced and its items are mapped again;
    each item has one result. Workers keep running between epochs.

    The state contains a state of the source from before the oldest undelivered item, and which later items were
    delivered. So resuming loses and repeats no item, even with a different number of workers or another platform.

    Random numbers in `fn` are seeded by item. They are the same for any number of workers, after a crash and after a
    resume. With `num_workers=0`, `fn` uses this process's generators, which the node does not seed.

    Args:
        source: the node whose items are mapped. It is read in the thread that calls `next()`.
        fn: the function of one item. With a start method other than fork it has to be picklable; with `platform`,
            lambdas and functions of a notebook are allowed too.
        num_workers: number of processes that call `fn`; 0 calls it in this process.
        platform: what runs the workers: a platform of `torch_dpflow.remote`; "processes" to try remote workers as
            processes of this host; None: local workers of this host.
        in_order: return results in the order of the source; else as they arrive. Without order, a node above that reads
            items again after a resume, such as torchdata's Unbatcher, loses and repeats items.
        prefetch_factor: number of items in flight per worker. None: as many as are read and mapped in 0.06 s, from 4 to
            128; fewer, but at least 2, if all together exceed 64 MiB. Quick items are sent in groups.
        snapshot_frequency: number of items between two states that are requested from the source, for a source whose
            state is large. When resuming, delivered items after that state are read again, but not mapped again.
        multiprocessing_context: how workers of this host start, as in torch's loader.
        options: a `LoaderOptions`; None for its defaults.

    `next()` raises these errors in place of the item that failed. The next call returns the item after it.

    - an error of `fn`: in a worker, one of its type with the item's number and the worker's traceback;
    - an error of the source, unchanged;
    - NotPicklableError: an item or a result cannot be sent between the processes;
    - PoisonTaskError: `LoaderOptions.poison_limit` workers have ended while they mapped the item.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
        MissingExtraError: the platform's library is not installed.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        fn: Callable[[Any], T],
        num_workers: int,
        *,
        platform: str | PlatformSpec | None = None,
        in_order: bool = True,
        prefetch_factor: int | None = None,
        snapshot_frequency: int = 1,
        multiprocessing_context: Any = None,
        options: LoaderOptions | None = None,
    ) -> None:
        check_type("source", source, BaseNode, "a node, as torchdata.nodes.IterableWrapper(source)")
        check_type("fn", fn, Callable, "a function of one item")
        check_int("num_workers", num_workers, minimum=0)
        check_int("snapshot_frequency", snapshot_frequency, minimum=1)
        self.source = source
        self._items = StreamReader(source, snapshot_frequency, encodes=num_workers > 0)
        loader: DPFlowDataLoader[Any] = DPFlowDataLoader(
            MappedItems(fn, reads_ahead=prefetch_factor is None),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._items,
            collate_fn=as_mapped,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            in_order=in_order,
            platform=platform,
            options=options,
        )
        super().__init__(loader)

    def shutdown(self) -> None:
        """End the workers, and shut down the source if it has a method `shutdown`."""
        super().shutdown()
        end = getattr(self.source, "shutdown", None)
        if end is not None:
            end()

    def _take(self, iterator: Iterator[Any]) -> T:
        progress: Any = self.loader._runtime.progress
        self._items.forget(progress.position)
        result: T = next(iterator)
        if result.__class__ is SourceFailed:  # no call, at which Control-C would lose the result
            raise self._items.failures.pop(result.number)  # type: ignore[attr-defined]
        return result


class StreamReader:
    """Sampler that reads a source node for a loader: the indices that it yields are the node's items.

    An iteration, except one that continues a loaded state, resets the source when its first item is drawn or its first
    state is taken. `iter` itself does not, because torch calls it more than once per epoch.

    Args:
        node: the source.
        frequency: number of items between two states that are requested from `node`.
        encodes: whether to encode the items, for sending them to workers.
    """

    def __init__(self, node: BaseNode[Any], frequency: int, *, encodes: bool) -> None:
        self._node = node
        self._frequency = frequency
        self._encodes = encodes
        #: Errors of reading the source or of encoding its items, by the number of the item.
        self.failures: dict[int, Exception] = {}
        #: States of the source, and how many items it had yielded before each; oldest first.
        self._snapshots: deque[tuple[int, Any]] = deque()
        #: Items drawn in this epoch.
        self._drawn = 0
        self._ended = False
        #: Whether the source is to be reset before it is used, and whether the next iteration continues a loaded state.
        self._is_due = True
        self._is_restored = False

    def __iter__(self) -> Iterator[StreamItem]:
        if not self._is_restored:
            self._is_due = True
        self._is_restored = False
        # No generator, which an error in it would end.
        return iter(self._draw, _END)

    def forget(self, delivered: int) -> None:
        """Drop states of the source that are no longer needed. delivered: number of items delivered so far."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= delivered:
            self._snapshots.popleft()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any] | Unsaved:
        """Return the state after `consumed` items of this epoch (None: all that were drawn), for `load_state_dict`.

        Return `Unsaved` if the source's `state_dict` failed; the loader then raises an error that names the source.
        """
        self._begin()
        consumed = self._drawn if consumed is None else consumed
        number, source = next(kept for kept in reversed(self._snapshots) if kept[0] <= consumed)
        if isinstance(source, Unsaved):
            return source
        ended = self._ended and consumed == self._drawn
        return {"source": source, "items": number, "skip": consumed - number, "ended": ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the source, and skip delivered items. Raises StateError if it ends earlier, or later, than before."""
        self._node.reset(copy.deepcopy(state["source"]))
        self._start(state["items"], state["source"])
        for skipped in range(state["skip"]):
            if self._next() is _END:
                raise StateError(
                    f"the source was to skip {state['skip']} items that were delivered, and ended after {skipped}"
                )
            self._drawn += 1
        if state["ended"] and self._next() is not _END:
            raise StateError(f"the source had ended after {self._drawn} items, and yields more now")
        self._is_restored = not self._ended

    def _begin(self) -> None:
        if self._is_due:
            self._node.reset()
            self._start(0, self._state())

    def _start(self, items: int, source: Any) -> None:
        self._snapshots = deque([(items, source)])
        self._drawn, self._ended, self._is_due = items, False, False
        self.failures = {}

    def _draw(self) -> Any:
        self._begin()
        began = time.perf_counter()
        item = _END if self._ended else self._next()
        if item is _END:
            return _END
        if self._encodes:
            item = self._encoded(item)
        self._drawn += 1
        if self._drawn - self._snapshots[-1][0] >= self._frequency:
            self._snapshots.append((self._drawn, self._state()))
        item.read_s = time.perf_counter() - began
        return item

    def _next(self) -> Any:
        """Return the next item, or its failure; `_END` at the end of the source."""
        try:
            return StreamItem(self._drawn, next(self._node))
        except StopIteration:
            self._ended = True
            return _END
        except Exception as error:
            return self._failed(error)

    def _encoded(self, item: StreamItem) -> StreamItem:
        try:
            return item.encode()
        except Exception as error:
            return self._failed(NotPicklableError(f"{item!r}: {error}")).encode()

    def _failed(self, error: Exception) -> StreamItem:
        self.failures[self._drawn] = error
        return StreamItem(self._drawn, SourceFailed(self._drawn))

    def _state(self) -> Any:
        try:
            return copy.deepcopy(self._node.state_dict())
        except Exception:
            return Unsaved(self._node)
