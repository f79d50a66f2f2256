"""What a flow's worker is told when it starts, and how it greets its shard."""

from __future__ import annotations

import struct

import msgspec

#: What a shard says first, before the digest of what is to be loaded: what tells it from others, its process, and
#: how many workers it is to have.
SHARD_ID_BYTES = 8


GREETING = struct.Struct(f"<{SHARD_ID_BYTES}sQQ")


class WorkerArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of a worker's role."""

    #: The id of its shard's process.
    shard: str
    #: Its number in the shard.
    number: int
