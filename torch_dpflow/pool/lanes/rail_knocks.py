"""Whether rails that have failed work again, found out while others are read over."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Set

from torch_dpflow.pool.lanes.pool_address import PoolAddress


class RailKnocks:
    """Connects to rails that have failed, and never waits for it: a connection over a cut link would hold a batch up.

    pool: a server, whose others are of the same cluster.
    """

    def __init__(self, pool: PoolAddress) -> None:
        self._pool = pool
        #: What is being connected to each; None: nothing for now.
        self._knocks: dict[str, socket.socket | None] = {}

    def failed(self, rails: Set[str]) -> None:
        """These do not work."""
        for rail in rails:
            self._knocks.setdefault(rail, None)

    def silent(self) -> Set[str]:
        """Those that have failed and do not answer."""
        for rail in [*self._knocks]:
            self._look(rail)
        return self._knocks.keys()

    def close(self) -> None:
        """Forget them."""
        for rail in [*self._knocks]:
            self._drop(rail)

    # -- inside ----------------------------------------------------------------------------------------------

    def _look(self, rail: str) -> None:
        knock = self._knocks[rail]
        if knock is None:
            self._knock(rail)
            return
        poll = select.poll()
        poll.register(knock, select.POLLOUT)
        if poll.poll(0):
            is_there = not knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._drop(rail)
            if not is_there:
                self._knocks[rail] = None

    def _knock(self, rail: str) -> None:
        with contextlib.suppress(OSError):  # there is no such name, or no way there: it is tried again
            there = self._pool.at(rail)
            family, kind, protocol, _, address = socket.getaddrinfo(
                there.host, there.port, type=socket.SOCK_STREAM
            )[0]
            knock = socket.socket(family, kind, protocol)
            knock.setblocking(False)
            knock.connect_ex(address)
            self._knocks[rail] = knock

    def _drop(self, rail: str) -> None:
        if (knock := self._knocks.pop(rail, None)) is not None:
            knock.close()
