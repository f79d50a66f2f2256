"""Messages between servers of a pool, and the table of which server holds what.

follower -> DatasetPart for each dataset that it holds, JoinPool, then FollowerHeartbeat about once a second
leader   -> Acknowledged, then Instructions
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

#: Maximum servers of a pool.
MAX_SERVERS = 100
#: File in a server's directory: the lock of its address, with its incarnation.
LOCK_FILE = "lock"
#: Maximum stripes in one message; larger tables and instructions come in parts.
MAX_STRIPES = 8192


@cache
def boot_id() -> str:
    """Return an id of this boot of the machine; the host name if a sandbox hides it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a pool."""

    #: Directory of its socket, unique on its host.
    directory: str
    #: Name of its host, and id of the host's boot.
    host: str
    boot: str
    #: tcp://HOST:PORT at which other hosts reach it; None if they do not.
    listen: str | None = None
    #: Random id of this start, which its directory has too; "" for an older release.
    incarnation: str = ""
    #: Bytes for samples, and free bytes.
    memory: int
    free: int = 0

    @property
    def name(self) -> str:
        """Name that is unique in the pool."""
        return f"{self.host}:{self.directory}"

    @property
    def is_near(self) -> bool:
        """Whether this process may map its memory: same machine, and its directory is this user's.

        In another container the directory may be missing, or be that of another server.
        """
        try:
            lock = Path(self.directory, LOCK_FILE)
            is_ours = lock.stat().st_uid == os.getuid()
            return self.boot == boot_id() and is_ours and lock.read_text() == self.incarnation != ""
        except (OSError, ValueError):
            return False


class DatasetPart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stripes of a dataset, at most `MAX_STRIPES`: reported by a follower that holds them, or to be held by it.

    A follower reports all of its datasets before it joins; answered by Acknowledged. An instruction without stripes
    updates the dataset's other fields.
    """

    source: AnySource
    identity: bytes
    is_explicit: bool
    #: Cut of the records that have a place; see `placement`.
    cut: int
    stripes: list[int]

    def split(self) -> list[DatasetPart]:
        """Split any number of stripes into parts that may be sent."""
        firsts = range(0, max(1, len(self.stripes)), MAX_STRIPES)
        return [msgspec.structs.replace(self, stripes=self.stripes[first : first + MAX_STRIPES]) for first in firsts]


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The message was accepted."""


class JoinPool(msgspec.Struct, frozen=True, tag=True):
    """Join the pool, with the datasets reported before; answered by Acknowledged."""

    server: ServerInfo


#: In place of a count: everything failed, as the dataset's metadata could not be read.
ALL_FAILED = -1


class DatasetState(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's progress with a dataset."""

    identity: bytes
    #: Whether all memory for it is reserved.
    is_placed: bool
    loaded: int
    failed: int
    readers: int
    error: str


class FollowerHeartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Renew a follower's lease; answered by Instructions after at most `wait_s`.

    applied: the number of the last instruction that `states` reflect; only changed states are sent.
    """

    applied: int
    states: list[DatasetState]
    wait_s: float


class DropDataset(msgspec.Struct, frozen=True, tag=True):
    """Drop a dataset, and report the reason to readers."""

    identity: bytes
    why: int


class Instructions(msgspec.Struct, frozen=True, tag=True):
    """Instructions for a follower, in order, and the number of the last one."""

    instructions: list[DatasetPart | DropDataset]
    last: int


class GetStripeTable(msgspec.Struct, frozen=True, tag=True):
    """Request the owners of a dataset's stripes, starting at stripe `first`; answered by StripeTablePart."""

    identity: bytes
    first: int = 0


class StripeTablePart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Owners of at most `MAX_STRIPES` stripes: indices in `servers`, or -1, little-endian 2-byte numbers."""

    #: Changes whenever owners change.
    generation: int
    per_stripe: int
    stripes: int
    servers: list[ServerInfo]
    owners: bytes
    #: Whether some samples have no place in memory; these are read ahead if an access plan is announced.
    is_part: bool
    #: Name of the server that answers.
    answered_by: str


class ListServers(msgspec.Struct, frozen=True, tag=True):
    """List the pool's servers; answered by ServerList."""


class ServerList(msgspec.Struct, frozen=True, tag=True):
    """The pool's servers, its leader first."""

    servers: list[ServerInfo]


ServerRequest: TypeAlias = GetStripeTable | ListServers | DatasetPart | JoinPool | FollowerHeartbeat
ServerAnswer: TypeAlias = StripeTablePart | ServerList | Acknowledged | Instructions
