"""Measurement of the time that data spends in TCP send queues and in transit, from the kernel's counters."""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress

#: Fields of `struct tcp_info`: unacknowledged segments; bytes that were not sent; and, microseconds, the time with
#: data under way, and of that those while the receiver, or the sender, had no buffer left.
_COUNT, _SEGMENTS_AT, _UNSENT_AT = struct.Struct("@I"), 24, 144
_TIMES, _TIMES_AT = struct.Struct("@QQQ"), 168
#: So many last segments may wait for 40 ms because the receiver is slow to acknowledge them, over any link.
_TAIL = 2


class LinkTime:
    """Time that data waited or was in transit on this process's TCP connections from or to a port.

    With port 0 the time is always 0. Not thread-safe.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        #: Time seen on each connection, seconds, by its inode.
        self._seen: dict[int, float] = {}

    @classmethod
    def of(cls, address: str) -> LinkTime:
        """Create an instance for the connections to or from `tcp://HOST:PORT`; for other addresses the time is 0."""
        return cls(int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0)

    def passed_s(self) -> float:
        """Return for how long data waited or was in transit since the last call, summed over connections, seconds.

        Connections that have almost no data to send or in transit at this moment are not counted. The time is 0 if the
        kernel does not report it. Do not call this for every message: it reads all descriptors of the process.
        """
        before, now = self._seen, self._look() if self._port else {}
        self._seen = {inode: way_s for inode, (way_s, _) in now.items()}
        return sum(
            max(0.0, way_s - before.get(inode, 0.0)) for inode, (way_s, is_under_way) in now.items() if is_under_way
        )

    def _look(self) -> dict[int, tuple[float, bool]]:
        found = {}
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                # Another thread may close it at any time, and its number may be reused.
                with suppress(OSError):
                    status = os.fstat(int(name))
                    if stat.S_ISSOCK(status.st_mode) and (seen := self._time_of(int(name))) is not None:
                        found[status.st_ino] = seen
        return found

    def _time_of(self, descriptor: int) -> tuple[float, bool] | None:
        one = socket.socket(fileno=descriptor)  # no copy, which would keep a connection that its owner closes
        try:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return None
            if self._port not in (one.getsockname()[1], one.getpeername()[1]):
                return None
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TIMES_AT + _TIMES.size)
        finally:
            one.detach()
        if len(info) < _TIMES_AT + _TIMES.size:
            return None
        passed, by_receiver, by_sender = _TIMES.unpack_from(info, _TIMES_AT)
        segments, unsent = (_COUNT.unpack_from(info, at)[0] for at in (_SEGMENTS_AT, _UNSENT_AT))
        return (passed - by_receiver - by_sender) / 1e6, segments > _TAIL or unsent > 0
