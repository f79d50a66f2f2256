"""The arguments of a flow's worker, and the greeting that its shard answers it with."""

from __future__ import annotations

import struct

import msgspec

#: Random bytes that tell a shard's process from the others.
SHARD_ID_BYTES = 8
#: The frame of a shard's `WorkerWelcome`: its id, its process id, its number of workers; then the content's digest.
GREETING = struct.Struct(f"<{SHARD_ID_BYTES}sQQ")


class WorkerArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of a worker's role."""

    #: The id of its shard's process.
    shard: str
    #: Its number in the shard.
    number: int
