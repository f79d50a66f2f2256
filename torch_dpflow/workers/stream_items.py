"""Items of a stream as tasks of workers: a task contains the item itself, instead of indices of a dataset.

Workers import this without torchdata.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch_dpflow.ipc.messages.headers import Frame, PayloadTable
from torch_dpflow.ipc.serialization.codec import decode, encode

#: Types of items that pickle takes as fast as it can: names, numbers, encoded objects.
_PLAIN = frozenset({bytes, str, int, float})


class SourceFailed(NamedTuple):
    """Placeholder for an item where the source raised an error; the error itself stays in the source's process."""

    number: int


class StreamItem:
    """Item of a stream, as it is sent to a worker.

    The value is encoded where the source is read, and decoded where the function is called. So errors of pickling and
    unpickling name the item's number, like errors of the function.

    Args:
        number: its place in the stream, from 0.
        value: the item, or `SourceFailed`.
    """

    __slots__ = ("_frames", "_table", "_value", "number", "read_s")

    def __init__(self, number: int, value: Any) -> None:
        self.number = number
        #: Time that the source took for the item, seconds; not sent.
        self.read_s = 0.0
        self._value = value
        self._table: PayloadTable | None = None
        self._frames: Sequence[Frame] = ()

    def encode(self) -> StreamItem:
        """Encode the value in place; return this item. Raises NotPicklableError, which names the part that failed."""
        if type(self._value) not in _PLAIN:
            self._table, self._frames = encode(self._value, name="item")
        return self

    def open(self) -> Any:
        """Return the value. Raises MessageError if it cannot be unpickled in this process."""
        if self._table is None:
            return self._value
        return decode(self._table, self._frames)

    def __reduce__(self) -> tuple[Any, ...]:
        # Within the pickle: a task is one frame of a message.
        if self._table is None:
            return StreamItem, (self.number, self._value)
        return _received, (self.number, self._table, [pickle.PickleBuffer(frame) for frame in self._frames])

    def __repr__(self) -> str:
        return f"item {self.number} of the stream"


def _received(number: int, table: PayloadTable, frames: Sequence[Frame]) -> StreamItem:
    item = StreamItem(number, None)
    item._table, item._frames = table, frames
    return item


class MappedItems:
    """Map-style dataset around a function: indexing it by an item returns the function's result.

    Args:
        reads_ahead: whether more items may be in flight than `prefetch_factor` allows, if they are quick.
    """

    def __init__(self, fn: Callable[[Any], Any], *, reads_ahead: bool) -> None:
        self.fn, self.reads_ahead = fn, reads_ahead

    def __getitem__(self, item: StreamItem) -> Any:
        value = item.open()
        if isinstance(value, SourceFailed):
            return value
        try:
            return self.fn(value)
        except StopIteration as error:
            # It would end the loop over the results, as if the stream had ended.
            raise RuntimeError(f"the function raised StopIteration at {item!r}") from error


def as_mapped(result: Any) -> Any:
    """Return `result` unchanged; used as the `collate_fn` of a stream."""
    return result
