"""Frames of a stream lane, each checked in one step. Pure.

    hello     magic, version, what the connection is for; both sides
    request   header | number of each record, and which part of it
    answer    header | number and length of each record | the bytes of those that have some, one behind the other

A reader's requests name records of one set, or parts of such. A server answers each once, in the order in which they
were asked for, as many in one answer as its turn has room for. A record that is not in memory yet is answered LATER;
once it is there, or never will be, it is named by an answer READY, and may be asked for again. An answer names its set
and each record with the bytes that come of it, so a reader knows before it takes a byte that it gets what it has asked
for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from torch_dpflow.errors import MessageError
from torch_dpflow.pool.messages import MAX_RECORDS

#: What a connection is for.
CONTROL, LANE = 1, 2
#: In the place of a record's length: it comes later; it stays in storage; the server has given up its set.
LATER, ABSENT, GONE = -1, -2, -3
#: What an answer is.
DATA, READY = 1, 2
#: A record of which a part is asked for: its number, where the part begins, and its bytes, or `WHOLE` of the record.
RecordPart: TypeAlias = tuple[int, int, int]
WHOLE = -1
#: Most bytes of a record.
MAX_RECORD_BYTES = 1 << 40

_HELLO = struct.Struct("<6sBB")
_MAGIC, _VERSION = b"dpflow", 2
HELLO_BYTES = _HELLO.size
_REQUEST = struct.Struct("<4sI16s")
_ASK = b"dpf?"
_ANSWER = struct.Struct("<4sHH16s")
_TELL = b"dpf!"
ANSWER_BYTES = _ANSWER.size
#: Number and length of a record.
ENTRY_BYTES = 16


def hello(purpose: int) -> bytes:
    """What each side says first."""
    return _HELLO.pack(_MAGIC, _VERSION, purpose)


def purpose_of(content: bytes) -> int:
    """What the other side's connection is for. Raises MessageError: it is no hello of this version."""
    magic, version, purpose = _HELLO.unpack(content)
    if magic != _MAGIC or purpose not in (CONTROL, LANE):
        raise MessageError("the other side is no server or client of a pool")
    if version != _VERSION:
        raise MessageError(
            f"the other side speaks version {version} of the pool's lanes, this one {_VERSION}; have both of one "
            "release"
        )
    return int(purpose)


class RecordRequest(NamedTuple):
    """Records of one set that a reader has room for, or parts of such."""

    identity: bytes
    parts: Sequence[RecordPart]

    def pack(self) -> bytes:
        """The frame."""
        count = len(self.parts)
        table = struct.pack(f"<{3 * count}q", *chain.from_iterable(self.parts))
        return _REQUEST.pack(_ASK, count, self.identity) + table


def take_request(content: bytearray) -> RecordRequest | None:
    """Take the next request off what has come; None if it is not whole. Raises MessageError."""
    if len(content) < _REQUEST.size:
        return None
    magic, count, identity = _REQUEST.unpack_from(content)
    if magic != _ASK or not 1 <= count <= MAX_RECORDS:
        raise MessageError(f"a request for {count} records; 1 to {MAX_RECORDS} are allowed")
    end = _REQUEST.size + 24 * count
    if len(content) < end:
        return None
    table = struct.unpack_from(f"<{3 * count}q", content, _REQUEST.size)
    begins, lengths = table[1::3], table[2::3]
    if min(begins) < 0 or min(lengths) < WHOLE:
        raise MessageError(f"a request for {min(lengths)} bytes from byte {min(begins)} on")
    del content[:end]
    return RecordRequest(identity, [*zip(table[::3], begins, lengths)])


def pack_answer(kind: int, identity: bytes, entries: Sequence[tuple[int, int]]) -> bytes:
    """Header and table of an answer; entries: number and length of each record, or `LATER`, `ABSENT`, `GONE`."""
    table = [number for entry in entries for number in entry]
    return _ANSWER.pack(_TELL, kind, len(entries), identity) + struct.pack(f"<{len(table)}q", *table)


def read_header(content: bytes) -> tuple[int, int, bytes]:
    """Kind, number of records, and set of an answer. Raises MessageError."""
    magic, kind, count, identity = _ANSWER.unpack(content)
    if magic != _TELL or kind not in (DATA, READY) or not 1 <= count <= MAX_RECORDS:
        raise MessageError(f"an answer of kind {kind} with {count} records; 1 to {MAX_RECORDS} are allowed")
    return kind, count, identity


def read_table(content: bytes) -> tuple[list[int], list[int]]:
    """Numbers and lengths of an answer's records. Raises MessageError."""
    table = struct.unpack(f"<{len(content) // 8}q", content)
    lengths = table[1::2]
    if min(lengths) < GONE or max(lengths) > MAX_RECORD_BYTES:
        raise MessageError(f"an answer with records of {min(lengths)} to {max(lengths)} bytes")
    return [*table[::2]], [*lengths]
