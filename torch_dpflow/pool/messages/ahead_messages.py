"""What a server of the pool and its readers say to each other of reading ahead."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

#: Most records in one message, and in all orders of a set: 2^27 take a GiB.
MOST_ANNOUNCED, LONGEST_ORDER = 15_000, 1 << 27
#: Records of an order that is extended which are announced and not read, at most: earlier ones are passed over.
MOST_COMING = 1 << 16
#: Most orders of a set; each has its part of the memory.
MOST_ORDERS = 4096
#: In the place of a length.
LEFT, COMES = -1, -2


class AnnounceOrder(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Records are read in this order from now on, which comes in parts; answered by Noted.

    Of an earlier order of this name nothing is left unless this extends it, and none of it when the connection ends.
    """

    identity: bytes
    order: str
    #: The place of the part's first record in the order, and the records of the whole.
    first: int
    total: int
    #: Records that readers ask for between an earlier one and its turn, at most.
    spread: int
    #: Whether they are read after those that this connection has announced by this name, if there are any.
    extends: bool = False
    #: Little-endian numbers of 4 bytes, at most `MOST_ANNOUNCED`.
    records: bytes


class OpenAhead(msgspec.Struct, frozen=True, tag=True):
    """Where this set's records are read ahead; answered by AheadOpened, with the memory."""

    identity: bytes


class WantAhead(msgspec.Struct, frozen=True, tag=True):
    """These records of an order are needed now, at most `MOST_RECORDS`; answered by AheadPlaces."""

    identity: bytes
    order: str
    records: list[int]


class TookAhead(msgspec.Struct, frozen=True, tag=True):
    """These records, which this connection was told the places of, were copied; answered by Noted.

    Only that answer says that what was copied is right: until then nothing else was written there.
    """

    identity: bytes
    records: list[int]


class AheadOpened(msgspec.Struct, frozen=True, tag=True):
    """The number of the memory that a set's records are read ahead into."""

    memory: int


class AheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """Where each record lies in that memory; instead of a length `COMES`, or `LEFT` for one to read from storage."""

    memory: int
    offsets: list[int]
    lengths: list[int]


AheadRequest: TypeAlias = AnnounceOrder | OpenAhead | WantAhead | TookAhead
AheadAnswer: TypeAlias = AheadOpened | AheadPlaces


def memory_name(memory: int) -> bytes:
    """What lanes call that memory, in the place of a set: its records there are offsets of what lies in it."""
    return memory.to_bytes(16, "big")
