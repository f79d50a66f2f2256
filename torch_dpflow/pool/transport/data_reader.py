"""Reads batches over stream lanes, one to each server.

The request is the grant: a server sends what it was asked for at once, so no more is asked for than can be taken.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from typing import TypeAlias

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.planning.request_window import BatchWindow, FixedWindow, LaneQueues, MeasuredWindow
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.authentication import StreamGuard, guard_of
from torch_dpflow.pool.transport.data_connection import AskedRecord, ReceiveMemory, StreamLane, WantedRecord
from torch_dpflow.pool.transport.data_frames import GONE, LATER

#: What a record comes as.
Content: TypeAlias = bytes | memoryview
#: Records that the window is asked about at a time.
_LOOKED_AT = 64
#: What one server of this host is asked for before the next, bytes: what it sends in two turns.
_TOGETHER_ON_HOST_BYTES = 2 << 20
#: What may be under way where all servers are of this host, bytes: enough that few answers carry much.
_ON_HOST_BYTES = 8 << 20
#: What a record is taken for whose length only the server knows, bytes.
_GUESSED_BYTES = 64 << 10
#: Between attempts to reach a server, seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class LaneReader:
    """Reads records from servers of one pool, for one thread at a time. A server that fails costs speed alone.

    Args:
        pool: one of its servers; the others have the same keys.
        silence_s: after how long without a byte that is due a server is left, seconds.
        window: how much may be asked for that has not come; None: what this reader measures, or 8 MiB where all servers
            are of this host.

    Raises OptionError: there are no keys.
    """

    def __init__(self, pool: PoolAddress, silence_s: float, window: BatchWindow | None = None) -> None:
        self._pool, self._silence_s = pool, silence_s
        self._guard: StreamGuard = guard_of(pool, serves=False)
        self._windows = (
            (MeasuredWindow(), FixedWindow(_ON_HOST_BYTES)) if window is None else (window, window)
        )
        self._window: BatchWindow = self._windows[0]
        self._lanes: dict[str, StreamLane] = {}
        self._memory = ReceiveMemory()
        #: Servers that have failed: until when they are left alone, and what says for how long the next time.
        self._left: dict[str, tuple[float, Backoff]] = {}
        self._poll = select.poll()
        #: Sets that a server has given up.
        self.gone: set[bytes] = set()

    def read(
        self,
        identity: bytes,
        owners: Sequence[str],
        wanted: Sequence[WantedRecord],
        *,
        copy: bool = True,
    ) -> list[Content | None]:
        """Records of one set, or parts of such; None for those that have to be read from storage.

        owners: the server of each, tcp://HOST:PORT.
        copy: False gives large ones as memoryviews that nobody can write to; their memory is used again when they are
            gone. What has a room is a view of that; where it is None, some of the room may have been written to.
        """
        lanes = [self._lane(owner) for owner in {*owners}]
        is_on_host = all(lane is not None and lane.is_on_host for lane in lanes)
        self._window = self._windows[is_on_host]
        together = _TOGETHER_ON_HOST_BYTES if is_on_host else 0
        batch = _LaneBatch(identity, owners, wanted, together, copy=copy)
        try:
            while True:
                self._ask(batch)
                busy = [one for one in self._lanes.items() if one[1].is_busy]
                if not busy:
                    return batch.contents
                self._take(busy, batch)
        except BaseException:
            self.close()  # what comes late must not be taken for what is asked for next
            raise

    def close(self) -> None:
        """Close all lanes; they are opened again where they are needed."""
        for owner in [*self._lanes]:
            self._close(owner)

    # -- inside ----------------------------------------------------------------------------------------------

    def _ask(self, batch: _LaneBatch) -> None:
        """Ask for as much as the window has room for."""
        while True:
            for owner in batch.queues.lanes:
                if self._lane(owner) is None:
                    batch.queues.drop(owner)
            now, sizes, lanes = time.monotonic(), batch.queues.sizes(_LOOKED_AT), len(batch.queues.lanes)
            granted = self._window.grant(sizes, now, lanes)
            if not granted:
                return
            asked: dict[str, list[AskedRecord]] = {}
            for place in batch.queues.take(sum(sizes[:granted])):
                token = self._window.asked(batch.sizes[place], now)
                one = AskedRecord(batch.wanted[place], place, token)
                asked.setdefault(batch.owners[place], []).append(one)
            for owner, ones in asked.items():
                lane = self._lanes[owner]
                is_first = not lane.asked
                try:
                    lane.ask(batch.identity, ones)
                    if is_first:
                        lane.heard_at = time.monotonic()
                except OSError as error:
                    self._lose(batch, owner, error)

    def _take(self, busy: Sequence[tuple[str, StreamLane]], batch: _LaneBatch) -> None:
        """Take an answer of each lane that has one; leave those that have been silent for too long."""
        for owner, lane in self._having(busy, batch):
            try:
                taken = lane.take(copy=batch.copy)
                lane.heard_at = time.monotonic()  # some may have come long after the first
                for one, content in taken:
                    self._settle(batch, lane, one, content)
            except (OSError, DPFlowError) as error:
                self._lose(batch, owner, error)

    def _settle(self, batch: _LaneBatch, lane: StreamLane, one: AskedRecord, content: Content | int) -> None:
        if content == 0:  # it was LATER, and is there
            batch.queues.again(one.place)
            return
        if one.token is not None:
            batch.queues.came(one.place)
        if not isinstance(content, int):
            self._window.arrived(one.token, time.monotonic())
        elif one.token is not None:
            self._window.given_up(one.token)
        if content == LATER:
            lane.later.setdefault(one.wanted.record, []).append(one._replace(token=None))
        elif not isinstance(content, int):
            batch.contents[one.place] = content
        elif content == GONE:
            self.gone.add(batch.identity)

    def _having(
        self, busy: Sequence[tuple[str, StreamLane]], batch: _LaneBatch
    ) -> Sequence[tuple[str, StreamLane]]:
        """Those of these lanes from which something has come."""
        if len(busy) == 1 and busy[0][1].asked:
            return busy  # which waits for it
        if found := [one for one in busy if one[1].has_bytes]:
            return found
        since = time.monotonic()
        due = min((lane.heard_at for _, lane in busy if lane.asked), default=since) + self._silence_s
        ready = {fd for fd, _ in self._poll.poll(max(0.0, due - since) * 1000)}
        # Of those that were not ready no byte had come by then, however long this thread has been suspended since.
        seen = since if ready else max(since, due)
        for owner, lane in busy:
            if lane.fileno() in ready:
                lane.heard_at = time.monotonic()
            elif lane.asked and seen >= lane.heard_at + self._silence_s:
                self._lose(batch, owner, TimeoutError())
            elif (
                not lane.asked and not ready
            ):  # its storage does not answer; ours may, and says so if it does not
                lane.later.clear()
        return [one for one in busy if one[1].fileno() in ready]

    def _lane(self, owner: str) -> StreamLane | None:
        """The lane to a server; None: it has failed, and it is too early to try again."""
        if (lane := self._lanes.get(owner)) is not None:
            return lane
        until, backoff = self._left.get(owner) or (-math.inf, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
        if time.monotonic() < until:
            return None
        try:
            lane = StreamLane(self._pool.at(owner), self._guard, self._silence_s, self._memory)
        except DPFlowError as error:
            self._leave(owner, error, backoff)
            return None
        self._left.pop(owner, None)
        self._lanes[owner] = lane
        self._poll.register(lane, select.POLLIN)
        return lane

    def _lose(self, batch: _LaneBatch, owner: str, error: Exception) -> None:
        """A server has failed: what it was asked for is read from storage."""
        is_silent = isinstance(error, BlockingIOError | TimeoutError)
        text = f"it has sent nothing for {self._silence_s:g} s" if is_silent else str(error)
        self._leave(owner, text, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
        self._close(owner)
        batch.queues.drop(owner)

    def _leave(self, owner: str, why: object, backoff: Backoff) -> None:
        self._left[owner] = time.monotonic() + backoff.pause_s(), backoff
        DATASETS.info("samples of %s are read from storage for now: %s", owner, why)

    def _close(self, owner: str) -> None:
        lane = self._lanes.pop(owner)
        for _, one in lane.asked:
            self._window.given_up(one.token)
        self._poll.unregister(lane)
        lane.close()


class _LaneBatch:
    """What one call reads."""

    def __init__(
        self,
        identity: bytes,
        owners: Sequence[str],
        wanted: Sequence[WantedRecord],
        together: int,
        *,
        copy: bool,
    ) -> None:
        self.identity, self.owners, self.wanted, self.copy = identity, owners, wanted, copy
        self.contents: list[Content | None] = [None] * len(wanted)
        self.sizes = [_GUESSED_BYTES if one.length is None else one.length for one in wanted]
        #: Places of those that are to be asked for.
        self.queues = LaneQueues(owners, self.sizes, together)
