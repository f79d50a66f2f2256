"""Frames of a data connection, each parsed and checked in one step. Pure.

    hello     magic, version, purpose of the connection; both sides
    request   header | number of each record, and the part of it
    answer    header | number and length of each record | the records' bytes, one after the other

A request names records of one dataset, or parts of records. The server answers each record once, in request order, and
several records per answer. A record that is not in memory yet is answered LATER; a READY answer names it again once it
is in memory or has failed, and the reader may then request it again. An answer carries the dataset's identity and each
record's number and length, so a reader can verify it before it receives any bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from torch_dpflow.errors import MessageError
from torch_dpflow.pool.messages import MAX_RECORDS

CONTROL, DATA_CONNECTION = 1, 2
#: In place of a record's length: not in memory yet; only in storage; the server does not hold the dataset.
LATER, ABSENT, GONE = -1, -2, -3
#: Kinds of answers: to a request; later, about records that were answered LATER.
DATA, READY = 1, 2
#: Part of a record: the record's number, the first byte, and the number of bytes or `WHOLE`.
RecordPart: TypeAlias = tuple[int, int, int]
WHOLE = -1
MAX_RECORD_BYTES = 1 << 40

_HELLO = struct.Struct("<6sBB")
_MAGIC, _VERSION = b"dpflow", 3
HELLO_BYTES = _HELLO.size
_REQUEST = struct.Struct("<4sI16s")
_QUERY = b"dpf?"
_ANSWER = struct.Struct("<4sHH16s")
_REPLY = b"dpf!"
ANSWER_BYTES = _ANSWER.size
#: Number and length of a record.
ENTRY_BYTES = 16


def memory_name(memory: int) -> bytes:
    """Return the identity that requests use for read-ahead memory number `memory`; record numbers are offsets in it."""
    return memory.to_bytes(16, "big")


def hello(purpose: int) -> bytes:
    """Return the first bytes that each side sends. purpose: `CONTROL` or `DATA_CONNECTION`."""
    return _HELLO.pack(_MAGIC, _VERSION, purpose)


def purpose_of(content: bytes) -> int:
    """Return the purpose of the connection from the peer's hello. Raises MessageError if it is invalid."""
    magic, version, purpose = _HELLO.unpack(content)
    if magic != _MAGIC or purpose not in (CONTROL, DATA_CONNECTION):
        raise MessageError("the other side is no server or client of a pool")
    if version != _VERSION:
        raise MessageError(
            f"the peer speaks version {version} of the pool's connections, and this side {_VERSION}; use the same "
            "release on both sides"
        )
    return int(purpose)


class RecordRequest(NamedTuple):
    """A reader's request for records, or parts of records, of one dataset."""

    identity: bytes
    parts: Sequence[RecordPart]

    def pack(self) -> bytes:
        count = len(self.parts)
        table = struct.pack(f"<{3 * count}q", *chain.from_iterable(self.parts))
        return _REQUEST.pack(_QUERY, count, self.identity) + table


def take_request(content: bytearray) -> RecordRequest | None:
    """Remove and return the next request in the received bytes; None if incomplete. Raises MessageError if invalid."""
    if len(content) < _REQUEST.size:
        return None
    magic, count, identity = _REQUEST.unpack_from(content)
    if magic != _QUERY or not 1 <= count <= MAX_RECORDS:
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
    """Return the bytes of an answer that precede the records: header and table.

    entries: number and length of each record, or `LATER`, `ABSENT`, `GONE` in place of the length.
    """
    table = [number for entry in entries for number in entry]
    return _ANSWER.pack(_REPLY, kind, len(entries), identity) + struct.pack(f"<{len(table)}q", *table)


def read_header(content: bytes) -> tuple[int, int, bytes]:
    """Return an answer's kind, number of records, and dataset identity. Raises MessageError if the header is wrong."""
    magic, kind, count, identity = _ANSWER.unpack(content)
    if magic != _REPLY or kind not in (DATA, READY) or not 1 <= count <= MAX_RECORDS:
        raise MessageError(f"an answer of kind {kind} with {count} records; 1 to {MAX_RECORDS} are allowed")
    return kind, count, identity


def read_table(content: bytes) -> tuple[list[int], list[int]]:
    """Return the numbers and the lengths of an answer's records. Raises MessageError for an impossible length."""
    table = struct.unpack(f"<{len(content) // 8}q", content)
    lengths = table[1::2]
    if min(lengths) < GONE or max(lengths) > MAX_RECORD_BYTES:
        raise MessageError(f"an answer with records of {min(lengths)} to {max(lengths)} bytes")
    return [*table[::2]], [*lengths]
