"""For how long what is sent over TCP is on its way, as Linux counts it: all the time where a link is full."""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress

#: Of `struct tcp_info`: segments that were not acknowledged; bytes that were not sent; and, microseconds, the time with
#: data under way, and of that those while the receiver, or the sender, had no room.
_COUNT, _SEGMENTS_AT, _UNSENT_AT = struct.Struct("@I"), 24, 144
_TIMES, _TIMES_AT = struct.Struct("@QQQ"), 168
#: So many last segments may wait for 40 ms because the receiver is slow to acknowledge them, over any link.
_TAIL = 2


class LinkTime:
    """The connections of this process that begin or end at a TCP port. Not thread-safe.

    port: 0: there are none.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        #: What was seen of each connection, seconds, by its inode.
        self._seen: dict[int, float] = {}

    @classmethod
    def of(cls, address: str) -> LinkTime:
        """Those to or from this address: there are none unless it is `tcp://HOST:PORT`."""
        return cls(int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0)

    def passed_s(self) -> float:
        """For how long what they have sent was on its way since the last call, all of them together, seconds.

        Only of those of which something is at this moment. Nothing where the kernel does not tell. It looks at all
        descriptors: not for every message.
        """
        before, now = self._seen, self._look() if self._port else {}
        self._seen = {inode: way_s for inode, (way_s, _) in now.items()}
        return sum(
            max(0.0, way_s - before.get(inode, 0.0))
            for inode, (way_s, is_under_way) in now.items()
            if is_under_way
        )

    def _look(self) -> dict[int, tuple[float, bool]]:
        found = {}
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                # Another thread may close it at any time, and its number may be another one's then.
                with suppress(OSError):
                    status = os.fstat(int(name))
                    if stat.S_ISSOCK(status.st_mode) and (told := self._told(int(name))) is not None:
                        found[status.st_ino] = told
        return found

    def _told(self, descriptor: int) -> tuple[float, bool] | None:
        one = socket.socket(fileno=descriptor)  # no copy, which would keep a connection that its owner closes
        try:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return None
            if self._port not in (one.getsockname()[1], one.getpeername()[1]):
                return None
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TIMES_AT + _TIMES.size)
        finally:
            one.detach()
        if len(told) < _TIMES_AT + _TIMES.size:
            return None
        passed, by_receiver, by_sender = _TIMES.unpack_from(told, _TIMES_AT)
        segments, unsent = (_COUNT.unpack_from(told, at)[0] for at in (_SEGMENTS_AT, _UNSENT_AT))
        return (passed - by_receiver - by_sender) / 1e6, segments > _TAIL or unsent > 0
