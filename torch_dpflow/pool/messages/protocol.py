"""What a server of the pool and its clients on one host say to each other, and where its socket is.

Each message is one packet of a Unix socket (SOCK_SEQPACKET), in MessagePack; regions come with it as descriptors. The
socket lies in a directory of mode 0700, and its owner is the only user who is answered.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow import errors
from torch_dpflow._core.checks import check_path, check_type
from torch_dpflow.errors import DPFlowError, OptionError
from torch_dpflow.pool.messages.ahead_messages import AheadAnswer, AheadRequest
from torch_dpflow.pool.messages.server_messages import ServerAnswer, ServerRequest
from torch_dpflow.pool.messages.set_source import AnySource as AnySource
from torch_dpflow.pool.messages.set_source import ArraySource as ArraySource
from torch_dpflow.pool.messages.set_source import SetSource as SetSource

#: The environment variable with the default `address` of clients and servers.
ADDRESS_VARIABLE = "DPFLOW_POOL"
#: Most bytes of a message.
MOST_BYTES = 64 << 10
#: Most records that one message asks for.
MOST_RECORDS = 4096
#: Most regions of a set, which come with one message (SCM_MAX_FD is 253).
MOST_REGIONS = 250
_SOCKET = "socket"
#: The kernel's limit for the path of a socket, bytes.
_LONGEST_PATH = 107
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_PEER = struct.Struct("3i")  # pid, uid, gid


class PreloadSet(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Hold this set; answered by SetInfo, which is asked for again until it is placed."""

    source: AnySource
    identity: bytes
    is_explicit: bool
    whole: bool


class ReadSet(msgspec.Struct, frozen=True, tag=True):
    """This process reads this set from now on, until the connection ends; answered by Noted."""

    identity: bytes


class OpenSet(msgspec.Struct, frozen=True, tag=True):
    """Map what this server holds of a set; answered by SetOpened, with regions from this one on."""

    identity: bytes
    first: int = 0


class WantRecords(msgspec.Struct, frozen=True, tag=True):
    """These records are needed now, at most `MOST_RECORDS`; answered by RecordStates.

    patience_s: how long the answer may wait for those that are on their way, seconds.
    """

    identity: bytes
    records: list[int]
    patience_s: float = 1.0


class PushStripe(msgspec.Struct, frozen=True, tag=True):
    """The rows of a stripe come as sealed memory, one descriptor; answered by RecordStates."""

    identity: bytes
    stripe: int


class CountReads(msgspec.Struct, frozen=True, tag=True):
    """So many more records were read from memory, and from storage. It has no answer, so no reader waits for it."""

    identity: bytes
    hits: _Count
    misses: _Count


class ListSets(msgspec.Struct, frozen=True, tag=True):
    """Answered by SetList, from the set with this number on."""

    first: int = 0


class UnloadSet(msgspec.Struct, frozen=True, tag=True):
    """Give up this set; answered by SetList."""

    identity: bytes


PoolRequest: TypeAlias = (
    PreloadSet
    | ReadSet
    | OpenSet
    | WantRecords
    | PushStripe
    | ListSets
    | UnloadSet
    | AheadRequest
    | ServerRequest
)


class SetInfo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One set in the pool."""

    identity: bytes
    ref: str
    #: Where its dataset lies.
    url: str
    #: Samples of the dataset; those that the pool has room for, has read, and could not read.
    records: int = 0
    placed: int = 0
    loaded: int = 0
    failed: int = 0
    #: Bytes that are reserved for it.
    reserved_bytes: int = 0
    #: Whether it stays until it is unloaded.
    is_explicit: bool
    #: Processes that read it.
    readers: int = 0
    #: Whether its places are known; before that `placed` is 0.
    is_placed: bool = False
    #: Samples that its readers have got from memory, and from storage.
    hits: int = 0
    misses: int = 0
    #: Of a set that clients have pushed: what opens it.
    pushed: ArraySource | None = None
    #: What kept a sample from being read, the first such error.
    error: str = ""


class SetOpened(msgspec.Struct, frozen=True, tag=True):
    """Regions come as descriptors, as many as `regions`, of `total` that this server has of the set."""

    regions: int
    total: int
    #: Sets of older versions whose regions come too, and how many of their first stripes are this set's.
    shares: dict[bytes, int] = {}
    #: As of `RecordStates`.
    held: int = 0


#: States of records: it is on its way; it is in memory; it has to be read from storage; it is not this server's.
PENDING, HERE, IN_STORAGE, ELSEWHERE = range(4)


class RecordStates(msgspec.Struct, frozen=True, tag=True):
    """The state of each record, one byte each, and the stripes of them that are in memory as a whole."""

    states: bytes
    stripes: list[int]
    #: Number of the holding that these are of; a set that is held again has new regions and a new number. 0: not held.
    held: int = 0


class SetList(msgspec.Struct, frozen=True, tag=True):
    """As many sets as one message has room for, and the bytes of the pool that are free and in all."""

    sets: list[SetInfo]
    free: int
    capacity: int
    #: Sets in the pool.
    total: int


class PoolRefusal(msgspec.Struct, frozen=True, tag=True):
    """The request was wrong, or cannot be done."""

    #: The class of the error, one of `errors`.
    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> PoolRefusal:
        """What tells this error to the other side."""
        return cls(type(error).__name__, str(error))

    def error(self) -> DPFlowError:
        """The error, of the class that it names if the library has it."""
        kind = getattr(errors, self.kind, DPFlowError)
        if not (isinstance(kind, type) and issubclass(kind, DPFlowError)):
            return DPFlowError(f"{self.kind}: {self.text}")
        return kind(self.text)


PoolAnswer: TypeAlias = (
    SetInfo | SetOpened | RecordStates | SetList | PoolRefusal | AheadAnswer | ServerAnswer
)
PoolMessage: TypeAlias = PoolRequest | PoolAnswer | CountReads
REQUESTS: msgspec.msgpack.Decoder[PoolRequest | CountReads] = msgspec.msgpack.Decoder(
    PoolRequest | CountReads
)
ANSWERS: msgspec.msgpack.Decoder[PoolAnswer] = msgspec.msgpack.Decoder(PoolAnswer)


def encode(message: PoolMessage) -> bytes:
    """A message as it is sent. Raises OptionError: it is too long."""
    packet = msgspec.msgpack.encode(message)
    if len(packet) > MOST_BYTES:
        raise OptionError(
            f"a message of {len(packet)} bytes; at most {MOST_BYTES} are allowed: shorten options"
        )
    return packet


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other side."""
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def find_directory(address: str | os.PathLike[str] = "auto") -> Path:
    """The directory of a pool: "auto" for what `DPFLOW_POOL` names, or else this user's on this host.

    Raises OptionTypeError, or OptionError where it is no path, or too long for a socket.
    """
    check_type("address", address, (str, os.PathLike), '"auto" or the path of a directory')
    if address == "auto":
        folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        address = os.environ.get(ADDRESS_VARIABLE) or Path(folder) / f"dpflow-pool-{os.getuid()}"
    if os.fspath(address) == "" or "://" in os.fspath(address):
        raise OptionError(
            f'address={os.fspath(address)!r} is no directory, which a server of this host has; give "auto" or the path '
            "of one, and what other hosts reach it at as --listen or listen="
        )
    check_path("address", os.fspath(address))
    found = Path(address).absolute()
    if len(os.fsencode(found / _SOCKET)) > _LONGEST_PATH:
        raise OptionError(
            f"address={str(found)!r} is too long for a socket; give a path of at most "
            f"{_LONGEST_PATH - len(_SOCKET) - 1} bytes"
        )
    return found


def socket_path(directory: Path) -> str:
    """The path of a pool's socket."""
    return str(directory / _SOCKET)


def check_private(directory: Path) -> None:
    """Raises OptionError: the directory is another user's, or others may enter it; OSError: there is none."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OptionError(
            f"{directory} must be a directory of this user that nobody else may enter (mode 0700); remove it, or give "
            "another address"
        )
