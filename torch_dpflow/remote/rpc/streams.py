"""One end of a stream, without socket or clock: order, credit, and how it ends.

Each direction counts its items from 0. The receiver grants credit as a total ("up to item 40"), so that
granting twice does no harm, and never holds more than its window. Each direction ends by itself; an abort
ends both.
"""

from __future__ import annotations

from torch_dpflow.errors import DPFlowError, MessageError, PeerLostError, StateError


class StreamState:
    """What one side knows of a stream. Not thread-safe.

    Args:
        window: most items that the peer may have sent and this side not consumed.
    """

    def __init__(self, *, window: int) -> None:
        self.window = window
        #: Items sent, and how many may be sent in all.
        self.sent = 0
        self.may_send = 0
        #: Items received, consumed, and granted to the peer in all: consumed <= received <= granted.
        self.received = 0
        self.consumed = 0
        self.granted = window
        #: Whether this side, or the peer, has said that no more items come.
        self.ended = False
        self.peer_ended = False
        #: Why the stream broke, once it has.
        self.error: DPFlowError | None = None

    @property
    def over(self) -> bool:
        """Nothing more will come or go."""
        return self.error is not None or (self.ended and self.peer_ended)

    @property
    def credit(self) -> int:
        """How many items may be sent now."""
        return 0 if self.error is not None or self.ended else self.may_send - self.sent

    def send(self) -> int:
        """Account for one item to be sent; its position. Raises StateError where none may be sent."""
        if self.error is not None:
            raise self.error
        if self.ended or self.credit <= 0:
            why = "it has ended" if self.ended else f"the peer granted {self.may_send} items and all are sent"
            raise StateError(f"cannot send on this stream: {why}")
        self.sent += 1
        return self.sent - 1

    def end(self) -> int | None:
        """This side sends no more; how many items it has sent. None where that was said before."""
        if self.over or self.ended:
            return None
        self.ended = True
        return self.sent

    def fail(self, error: DPFlowError) -> bool:
        """Break the stream; False where it is over already."""
        if self.over:
            return False
        self.error = error
        return True

    def on_item(self, position: int) -> DPFlowError | None:
        """An item came in; the error that it breaks the stream with, if it does."""
        if position > self.received:
            return self._lost_before(position)
        if position < self.received or self.peer_ended or self.received >= self.granted:
            return MessageError(
                f"item {position} of a stream: expected {self.received}, with {self.granted} granted"
                f"{', and the stream has ended' if self.peer_ended else ''}"
            )
        self.received += 1
        return None

    def on_end(self, position: int) -> DPFlowError | None:
        """The peer says that no more items come; the error that this breaks the stream with, if it does."""
        error = self._lost_before(position)
        if error is None:
            self.peer_ended = True
        return error

    def on_credit(self, items: int) -> None:
        """The peer grants `items` in all."""
        self.may_send = max(self.may_send, items)

    def on_report(self, *, sent: int, ended: bool, granted: int) -> DPFlowError | None:
        """The peer says where it stands: makes up for a lost end or credit; a lost item breaks the stream."""
        self.on_credit(granted)
        if ended and not self.peer_ended:
            return self.on_end(sent)
        return self._lost_before(sent)

    def consume(self) -> int | None:
        """One received item is used up; the total to grant, where it is time to say so.

        Credit is granted when half of the window is used up: often enough that a quick reader never holds up
        the sender, seldom enough that it costs little.
        """
        if self.consumed >= self.received:
            raise StateError("nothing to consume: every item of this stream that came in is used up")
        self.consumed += 1
        if self.peer_ended or self.error is not None or self.granted - self.consumed > self.window // 2:
            return None
        self.granted = self.consumed + self.window
        return self.granted

    def report(self) -> tuple[int, bool, int]:
        """Where this side stands: what `on_report` of the peer takes."""
        return self.sent, self.ended, self.granted

    def _lost_before(self, position: int) -> DPFlowError | None:
        lost = position - self.received
        return PeerLostError(f"{lost} items of a stream were lost on the way; open it anew") if lost else None

    def validate(self) -> None:
        """Raise AssertionError unless the counts agree."""
        assert 0 <= self.consumed <= self.received <= self.granted <= self.consumed + self.window
        assert 0 <= self.sent <= max(self.may_send, self.sent)
