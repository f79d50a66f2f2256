"""Messages between pool servers and their clients, and among servers, in MessagePack.

follower -> DatasetPart for each dataset that it holds, JoinPool, then FollowerHeartbeat about once a second
leader   -> Acknowledged, then Instructions
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from torch_dpflow import errors
from torch_dpflow.errors import DPFlowError


class DatasetSource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stored dataset that the pool is to cache."""

    #: Directory of the dataset store, or of indexes, and fsspec's options for it.
    store: str
    options: dict[str, Any]
    #: Full name of the variant.
    ref: str
    #: Whether it is an index of `open_dataset`.
    is_index: bool = False
    #: fsspec's options for the data; None for those of the store.
    data_options: dict[str, Any] | None = None


class ArraySource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Array whose rows are the records: in a file on any storage, or pushed by clients. `pool.open_array` makes it."""

    #: Display name.
    ref: str
    #: numpy's dtype string of the elements, and the shape, records first.
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]]
    #: Changes with the content: size and ETag or time of the file, or a digest of a pushed array.
    stamp: str
    #: URL of the file, and fsspec's options for it; "" for a pushed array.
    url: str = ""
    options: dict[str, Any] = {}
    #: Byte offset of the first row; None for an HDF5 file, with the path of the dataset in it.
    start: int | None = None
    path: str = ""
    #: For a further version of a pushed array: identity of the older one, and how many stripes both share.
    base: bytes = b""
    shared: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def is_pushed(self) -> bool:
        """Whether clients pushed the array, so that no storage has it."""
        return not self.url


AnySource: TypeAlias = DatasetSource | ArraySource

#: Maximum records in one message, and in all access plans of a dataset: 2^27 take a GiB.
MAX_ANNOUNCED, MAX_PLAN_RECORDS = 15_000, 1 << 27
#: In place of a length: read the record from storage; the record is on its way.
IN_STORAGE_ONLY, ON_ITS_WAY = -1, -2


class AnnounceAccessPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: announce the order in which records will be read, in parts. Answered by Acknowledged.

    A part that starts a plan replaces an earlier plan of this name. A part that extends a plan has no answer, because a
    training loop draws the order meanwhile. The plan ends with the connection.
    """

    identity: bytes
    plan: str
    #: Position of the part's first record in the order, and the number of records of the whole.
    first: int
    total: int
    #: Maximum distance from a record's position at which it may be requested.
    spread: int
    #: Whether to append to the plan of this name and connection, if there is one.
    extends: bool = False
    #: Little-endian 4-byte numbers, at most `MAX_ANNOUNCED`.
    records: bytes


class GetAheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """Request: get the places of records of a plan, and confirm copies. Answered by AheadPlaces.

    At most `MAX_RECORDS` of each. A copy is valid only if the server answers: only then has it written nothing else to
    the copied places.
    """

    identity: bytes
    plan: str
    records: list[int]
    #: Copied records, whose places this connection was given.
    copied: list[int]
    #: Number of the memory that the reader has mapped, or 0. If the server uses other memory, and is on the reader's
    #: host, the answer brings the descriptor.
    memory: int


class AheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """Answer: the place of each record in the memory with this number.

    A length may also be `ON_ITS_WAY` or `IN_STORAGE_ONLY`.
    """

    memory: int
    offsets: list[int]
    lengths: list[int]


#: Maximum bytes of a request, which any client sends, and of an answer, whose server its client has authenticated.
MAX_MESSAGE_BYTES, MAX_ANSWER_BYTES = 64 << 10, 64 << 20
#: Maximum records that one message requests.
MAX_RECORDS = 4096
#: Maximum segments that come with one message (SCM_MAX_FD is 253).
MAX_SEGMENTS = 250
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class PreloadDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: cache this dataset. Answered by CachedDataset; repeat the request until the dataset is placed."""

    source: AnySource
    identity: bytes
    is_explicit: bool
    whole: bool


class StartReading(msgspec.Struct, frozen=True, tag=True):
    """Request: declare that this process reads the dataset until the connection ends. Answered by Acknowledged."""

    identity: bytes


class OpenDataset(msgspec.Struct, frozen=True, tag=True):
    """Request: map this server's segments of a dataset, starting at segment `first`. Answered by DatasetOpened."""

    identity: bytes
    first: int = 0


class GetRecordStates(msgspec.Struct, frozen=True, tag=True):
    """Request: read these records now, at most `MAX_RECORDS`. Answered by RecordStates.

    wait_s: how long the answer may wait for records that are still being read, seconds.
    """

    identity: bytes
    records: list[int]
    wait_s: float = 1.0


class PushStripe(msgspec.Struct, frozen=True, tag=True):
    """Request: store the rows of a stripe. Their sealed memory comes as a descriptor. Answered by RecordStates."""

    identity: bytes
    stripe: int


class CountReads(msgspec.Struct, frozen=True, tag=True):
    """Report: number of further reads from memory and from storage. Has no answer, so no reader waits for one."""

    identity: bytes
    hits: _Count
    misses: _Count


class ListDatasets(msgspec.Struct, frozen=True, tag=True):
    """Request: list datasets. Answered by CachedDatasetList."""


class UnloadDataset(msgspec.Struct, frozen=True, tag=True):
    """Request: unload this dataset. Answered by CachedDatasetList."""

    identity: bytes


class CachedDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One dataset in the pool."""

    identity: bytes
    ref: str
    url: str
    #: Samples of the dataset; of these, placed in memory, loaded, and failed.
    records: int = 0
    placed: int = 0
    loaded: int = 0
    failed: int = 0
    reserved_bytes: int = 0
    #: Whether it stays until it is unloaded.
    is_explicit: bool
    #: Number of processes that read it.
    readers: int = 0
    #: Whether all memory for it is reserved; before that `placed` is 0.
    is_placed: bool = False
    #: Samples read from memory, and from storage.
    hits: int = 0
    misses: int = 0
    pushed: ArraySource | None = None
    #: First error of a failed sample.
    error: str = ""


class DatasetOpened(msgspec.Struct, frozen=True, tag=True):
    """Answer: how many segments come as descriptors, and how many the dataset has on this server."""

    segments: int
    total: int
    #: Older versions whose segments come too, and how many of their first stripes belong to this dataset.
    shares: dict[bytes, int] = {}
    #: As in `RecordStates`.
    held: int = 0


#: States of records: on its way; in memory; only in storage; not this server's.
PENDING, HERE, IN_STORAGE, ELSEWHERE = range(4)


class RecordStates(msgspec.Struct, frozen=True, tag=True):
    """Answer: the state of each record, one byte each, and which of the records' stripes are completely loaded."""

    states: bytes
    stripes: list[int]
    #: Number of the held dataset; one that is dropped and cached again has a new number. 0 if it is not held.
    held: int = 0


class CachedDatasetList(msgspec.Struct, frozen=True, tag=True):
    """Answer: the pool's datasets, and its free and total bytes."""

    datasets: list[CachedDataset]
    free: int
    capacity: int


class PoolRefusal(msgspec.Struct, frozen=True, tag=True):
    """Answer: the request was wrong, or cannot be fulfilled."""

    #: Name of the error's class in `errors`.
    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> PoolRefusal:
        return cls(type(error).__name__, str(error))

    def error(self) -> DPFlowError:
        """Return an error of the named class, or a DPFlowError if this release has no such class."""
        kind = getattr(errors, self.kind, DPFlowError)
        if not (isinstance(kind, type) and issubclass(kind, DPFlowError)):
            return DPFlowError(f"{self.kind}: {self.text}")
        return kind(self.text)


#: File in a server's directory: the lock of its address, with its incarnation.
LOCK_FILE = "lock"
#: Maximum stripes in one report of a follower; more are reported in parts.
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
    #: Random id of this start, which the server's directory contains too; "" for an older release.
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
        """Whether this process may map the server's memory: same machine, and this user owns the server's directory.

        In another container the directory may be missing, or belong to another server.
        """
        try:
            lock = Path(self.directory, LOCK_FILE)
            is_ours = lock.stat().st_uid == os.getuid()
            return self.boot == boot_id() and is_ours and lock.read_text() == self.incarnation != ""
        except (OSError, ValueError):
            return False


class DatasetPart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stripes of a dataset: a follower's report of held ones, at most `MAX_STRIPES`, or an instruction to hold them.

    A follower reports all of its datasets before it joins; the leader answers Acknowledged. An instruction without
    stripes updates the dataset's other fields.
    """

    source: AnySource
    identity: bytes
    is_explicit: bool
    #: Cut under which records have a place in memory; see `layout.resident`.
    cut: int
    stripes: list[int]

    def split(self) -> list[DatasetPart]:
        """Split any number of stripes into reports that may be sent."""
        firsts = range(0, max(1, len(self.stripes)), MAX_STRIPES)
        return [msgspec.structs.replace(self, stripes=self.stripes[first : first + MAX_STRIPES]) for first in firsts]


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answer: the message was accepted."""


class JoinPool(msgspec.Struct, frozen=True, tag=True):
    """Request: join the pool, with the datasets that were reported before. Answered by Acknowledged."""

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
    """Request: renew a follower's lease. Answered by Instructions after at most `wait_s` seconds.

    Only changed states are sent. They reflect all instructions of earlier answers.
    """

    states: list[DatasetState]
    wait_s: float


class DropDataset(msgspec.Struct, frozen=True, tag=True):
    """Instruction: drop a dataset, and report the reason to its readers."""

    identity: bytes
    why: int


class Instructions(msgspec.Struct, frozen=True, tag=True):
    """Answer: instructions for a follower, in order."""

    instructions: list[DatasetPart | DropDataset]


class GetStripeTable(msgspec.Struct, frozen=True, tag=True):
    """Request: get the owners of a dataset's stripes. Answered by StripeTable."""

    identity: bytes


class StripeTable(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer: the owners of a dataset's stripes."""

    per_stripe: int
    servers: list[ServerInfo]
    #: By stripe its owner's index in `servers`, or -1: little-endian 2-byte numbers.
    owners: bytes
    #: Whether some samples have no place in memory; these are read ahead if an access plan is announced.
    is_part: bool
    #: Name of the server that answers.
    answered_by: str


class ListServers(msgspec.Struct, frozen=True, tag=True):
    """Request: list the pool's servers. Answered by ServerList."""


class ServerList(msgspec.Struct, frozen=True, tag=True):
    """Answer: the pool's servers, its leader first."""

    servers: list[ServerInfo]


PoolRequest: TypeAlias = (
    PreloadDataset
    | StartReading
    | OpenDataset
    | GetRecordStates
    | PushStripe
    | AnnounceAccessPlan
    | GetAheadPlaces
    | ListDatasets
    | UnloadDataset
    | ListServers
    | GetStripeTable
    | DatasetPart
    | JoinPool
    | FollowerHeartbeat
)
PoolAnswer: TypeAlias = (
    CachedDataset
    | DatasetOpened
    | RecordStates
    | AheadPlaces
    | CachedDatasetList
    | ServerList
    | StripeTable
    | Acknowledged
    | Instructions
    | PoolRefusal
)
