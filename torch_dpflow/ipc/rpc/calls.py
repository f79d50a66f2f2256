"""The client's side of calls, without socket or clock: which are open, and which replies the server may drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from torch_dpflow.ipc.messages.payload_table import Frame


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that is not answered yet, with all that is needed to send it again."""

    id: int
    method: str
    body: msgspec.Raw
    frames: Sequence[Frame]
    #: When it was made and when its caller stops waiting; seconds of the caller's clock.
    began: float
    deadline: float


class CallTable:
    """Numbers the calls and keeps those that are open. Not thread-safe.

    The server keeps a reply until the client reports the call as completed: by `completed_below`, or where an older
    call stays open for long, by its number in `answered`.
    """

    def __init__(self) -> None:
        self._next = 1
        #: By id, in ascending order, because ids ascend and dicts keep the order of insertion.
        self._open: dict[int, OpenCall] = {}
        self._answered: list[int] = []

    @property
    def completed_below(self) -> int:
        """Every call below this number is answered or given up."""
        return next(iter(self._open), self._next)

    def begin(
        self, method: str, body: msgspec.Raw, frames: Sequence[Frame], *, now: float, timeout_s: float
    ) -> OpenCall:
        """Open a call."""
        call = OpenCall(self._next, method, body, frames, now, now + timeout_s)
        self._next += 1
        self._open[call.id] = call
        return call

    def finish(self, call_id: int) -> OpenCall | None:
        """Close a call that is answered or given up; None where it is closed already."""
        call = self._open.pop(call_id, None)
        if call is not None and self._open:
            self._answered.append(call_id)
        return call

    def take_answered(self) -> list[int]:
        """Calls that were completed since the last time and are not below `completed_below`, for the next request."""
        if not self._answered:
            return []
        answered, self._answered = self._answered, []
        first_open = self.completed_below
        return [call_id for call_id in answered if call_id >= first_open]

    def older_than(self, moment: float) -> list[int]:
        """The open calls that began before `moment`: their request or reply may be lost."""
        return [call.id for call in self._open.values() if call.began < moment]
