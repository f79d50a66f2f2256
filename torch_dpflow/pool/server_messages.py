"""What servers of a pool say to each other, and where a reader finds what it reads.

a member -> DatasetPart for each set that it holds, Enlist, then Beat about once a second, and soon again after orders
its head -> Noted, then Orders
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec

from torch_dpflow.pool.messages import AnySource

#: Most servers of a pool.
MAX_SERVERS = 100
#: In a server's directory: the lock of its address, with the name of its incarnation.
LOCK_FILE = "lock"
#: Most stripes in one message; a table or an order that has more comes in parts.
MAX_STRIPES = 8192


@cache
def boot_id() -> str:
    """What no other machine has, and this one until it starts again; its name where a sandbox hides that."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a pool."""

    #: The directory of its socket, on its host; no two have the same on one host.
    directory: str
    #: The name of its host, and of the boot of its kernel.
    host: str
    boot: str
    #: tcp://HOST:PORT, where other hosts reach it; None: nowhere.
    listen: str | None = None
    #: What it has drawn as it began, which is in its directory too; "": an older release's.
    incarnation: str = ""
    #: Bytes for samples, and those that are free.
    memory: int
    free: int = 0

    @property
    def name(self) -> str:
        """What no other server of the pool has."""
        return f"{self.host}:{self.directory}"

    @property
    def is_near(self) -> bool:
        """Whether this process may map its memory: it runs on this machine, and its directory is here and this user's.

        In another container there may be none, or that of another server.
        """
        try:
            lock = Path(self.directory, LOCK_FILE)
            is_ours = lock.stat().st_uid == os.getuid()
            return self.boot == boot_id() and is_ours and lock.read_text() == self.incarnation != ""
        except (OSError, ValueError):
            return False


class DatasetPart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stripes of a set, at most `MAX_STRIPES`: of a member those that it holds, of its head what it is to hold too.

    A member says so of all of its sets before it enlists; answered by Noted. An order with no stripes: the set's other
    facts have changed.
    """

    source: AnySource
    identity: bytes
    is_explicit: bool
    #: Of the records that have a place; see `residents`.
    cut: int
    stripes: list[int]

    def split(self) -> list[DatasetPart]:
        """The same, of any number of stripes, in parts that may be sent."""
        firsts = range(0, max(1, len(self.stripes)), MAX_STRIPES)
        return [
            msgspec.structs.replace(self, stripes=self.stripes[first : first + MAX_STRIPES])
            for first in firsts
        ]


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """It was understood."""


class JoinPool(msgspec.Struct, frozen=True, tag=True):
    """This server joins the pool, with what it has reported; answered by Noted."""

    server: ServerInfo


#: In the place of a count: all that a member was to read, as the set's metadata could not be read.
ALL_FAILED = -1


class DatasetState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a member is with a set."""

    identity: bytes
    #: Whether all memory that it is to have is there.
    is_placed: bool
    loaded: int
    failed: int
    readers: int
    error: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A member lives; answered by Orders, after so many seconds at most.

    obeyed: the number of the last order that `states` tell of, which are those that have changed.
    """

    applied: int
    states: list[DatasetState]
    wait_s: float


class DropDataset(msgspec.Struct, frozen=True, tag=True):
    """Give up a set; readers are told why."""

    identity: bytes
    why: int


class Instructions(msgspec.Struct, frozen=True, tag=True):
    """What a member has to do, in order, and the number of the last of them."""

    instructions: list[DatasetPart | DropDataset]
    last: int


class GetStripeTable(msgspec.Struct, frozen=True, tag=True):
    """Who holds the stripes of a set from this one on; answered by StripeTablePart."""

    identity: bytes
    first: int = 0


class StripeTablePart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The owners of at most `MAX_STRIPES` stripes: places in `servers`, or -1, little-endian numbers of 2 bytes."""

    #: Another one: stripes have other owners.
    generation: int
    per_stripe: int
    #: Stripes of the set.
    stripes: int
    servers: list[ServerInfo]
    owners: bytes
    #: Whether some samples have no place in memory: those are read ahead where an order is announced.
    is_part: bool
    #: The name of the server that was asked.
    answered_by: str


class ListServers(msgspec.Struct, frozen=True, tag=True):
    """Answered by ServerList."""


class ServerList(msgspec.Struct, frozen=True, tag=True):
    """The servers of the pool; the first is its head."""

    servers: list[ServerInfo]


ServerRequest: TypeAlias = GetStripeTable | ListServers | DatasetPart | JoinPool | Heartbeat
ServerAnswer: TypeAlias = StripeTablePart | ServerList | Acknowledged | Instructions
