"""The members of a pool as its head knows them: what each has been told, and what it has said. Not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torch_dpflow.errors import PeerLostError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages.protocol import MOST_BYTES
from torch_dpflow.pool.messages.server_messages import (
    MOST_SERVERS,
    Beat,
    DropOrder,
    Orders,
    ServerInfo,
    SetPart,
    SetState,
)

#: In the head's directory while it has members: the head that comes after it waits for them.
_FILE = "members"


@dataclass(eq=False)
class EnlistedServer:
    """One server, from when it has enlisted."""

    info: ServerInfo
    generation: int
    #: Orders that it has not got, and how many there were in all.
    orders: deque[SetPart | DropOrder] = field(default_factory=deque)
    ordered: int = 0
    #: The number of the last order about each set, and the last word on it that tells of that.
    last_orders: dict[bytes, int] = field(default_factory=dict)
    states: dict[bytes, SetState] = field(default_factory=dict)

    def order(self, order: SetPart | DropOrder) -> None:
        """Have it do this."""
        parts = [order] if isinstance(order, DropOrder) else order.split()
        self.orders.extend(parts)
        self.ordered += len(parts)
        self.last_orders[order.identity] = self.ordered
        self.states.pop(order.identity, None)
        if isinstance(order, DropOrder):
            del self.last_orders[order.identity]

    def take(self, beat: Beat) -> Iterator[SetState]:
        """Believe what it says of sets about which it has got all orders."""
        for state in beat.states:
            if self.last_orders.get(state.identity, 0) <= beat.obeyed:
                self.states[state.identity] = state
                yield state

    def next_orders(self) -> Orders:
        """As many orders as one message has room for."""
        orders, room = list[SetPart | DropOrder](), MOST_BYTES // 2
        while self.orders:
            room -= len(msgspec.msgpack.encode(self.orders[0]))
            if room < 0 and orders:
                break
            orders.append(self.orders.popleft())
        return Orders(orders, self.ordered - len(self.orders))


class Members:
    """All members, by name.

    directory: the head's own.
    """

    def __init__(self, directory: str) -> None:
        self._file = Path(directory, _FILE)
        self._members: dict[str, EnlistedServer] = {}
        #: Whether an earlier head at this address had some.
        self.had_some = self._file.exists()

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def add(self, info: ServerInfo, generation: int) -> None:
        """A server enlists. Raises UsageError: there are too many."""
        if len(self._members) >= MOST_SERVERS - 1 and info.name not in self._members:
            raise UsageError(f"the pool has {MOST_SERVERS} servers; have it join another one")
        self._members[info.name] = EnlistedServer(info, generation)
        self._write()
        SERVICE.info("server %s has joined the pool", info.name)

    def get(self, name: str, generation: int) -> EnlistedServer:
        """A member. Raises PeerLostError: it has been given up."""
        member = self._members.get(name)
        if member is None or member.generation != generation:
            raise PeerLostError(
                f"server {name} of the pool was given up, as nothing was heard of it; it may join anew"
            )
        return member

    def order(self, name: str, order: SetPart | DropOrder) -> None:
        """Have a member do this."""
        self._members[name].order(order)

    def forget(self, lives: Callable[[str, int], bool]) -> None:
        """Forget those that do not live."""
        for name, member in list(self._members.items()):
            if not lives(name, member.generation):
                SERVICE.warning("server %s of the pool is lost", name)
                del self._members[name]
                self._write()

    def infos(self, head: ServerInfo, rooms: Mapping[str, tuple[int, int]]) -> dict[str, ServerInfo]:
        """Who they and their head are. rooms: the bytes of each that counts, and those that are free."""
        infos = {head.name: head, **{name: member.info for name, member in self._members.items()}}
        return {
            name: msgspec.structs.replace(info, free=rooms[name][1])
            for name, info in infos.items()
            if name in rooms
        }

    def states(self, identity: bytes) -> dict[str, SetState]:
        """What each has said of a set."""
        return {
            name: member.states[identity]
            for name, member in self._members.items()
            if identity in member.states
        }

    def _write(self) -> None:
        if self._members:
            self._file.write_text("".join(f"{name}\n" for name in self._members))
        else:
            self._file.unlink(missing_ok=True)
