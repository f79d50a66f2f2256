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
    """Description of an array to cache row by row: in a file (`pool.open_array`), or pushed by clients (`push`)."""

    #: Display name.
    ref: str
    #: numpy's dtype string of the elements, and the shape, records first.
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]]
    #: Text that changes with the content: size and ETag or time of the file, or a digest of a pushed array.
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
    """Request: get where records of a plan lie in the memory for reading ahead, and confirm copies of earlier ones.

    Answered by AheadPlaces. Each list has at most `MAX_RECORDS` records. A copy is valid only if the server answers:
    the answer shows that the server had written nothing else there until the copy was made.
    """

    identity: bytes
    plan: str
    records: list[int]
    #: Records that the reader has copied from places in earlier answers on this connection.
    copied: list[int]
    #: Number of the memory that the reader has mapped, or 0. If the server uses a different memory, and is on the
    #: reader's host, the answer comes with the memory's descriptor.
    memory: int


class AheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """Answer: offset and length of each record in the server's memory for reading ahead, which `memory` numbers.

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
    #: Whether the dataset stays until it is unloaded; otherwise it is dropped once no process has read it for a while.
    is_explicit: bool
    #: Whether to refuse a dataset that does not fit completely; otherwise a part is cached.
    whole: bool


class StartReading(msgspec.Struct, frozen=True, tag=True):
    """Request: declare that this process reads the dataset until the connection ends. Answered by Acknowledged."""

    identity: bytes


class OpenDataset(msgspec.Struct, frozen=True, tag=True):
    """Request: get this server's segments of a dataset, from segment `first` to the last. Answered by DatasetOpened."""

    identity: bytes
    first: int = 0


class GetRecordStates(msgspec.Struct, frozen=True, tag=True):
    """Request: read these records before others, at most `MAX_RECORDS`, and get their states.

    Answered by RecordStates. wait_s: how long the answer may wait for records that are still to be read, seconds.
    """

    identity: bytes
    records: list[int]
    wait_s: float = 1.0


class PushStripe(msgspec.Struct, frozen=True, tag=True):
    """Request: store the rows of a stripe, sent as a descriptor of sealed memory. Answered by RecordStates."""

    identity: bytes
    stripe: int


class CountReads(msgspec.Struct, frozen=True, tag=True):
    """Report: reads from memory and from storage since the last report. Has no answer, so no reader waits for one."""

    identity: bytes
    hits: _Count
    misses: _Count


class ListDatasets(msgspec.Struct, frozen=True, tag=True):
    """Request: list datasets. Answered by CachedDatasetList."""


class UnloadDataset(msgspec.Struct, frozen=True, tag=True):
    """Request: unload this dataset. Answered by CachedDatasetList."""

    identity: bytes


class CachedDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """State of one dataset in the pool."""

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
    #: Whether all memory for it is reserved, on all servers.
    is_placed: bool = False
    #: Samples read from memory, and from storage.
    hits: int = 0
    misses: int = 0
    #: Description of a pushed array; None for any other dataset.
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


#: States of records: still to be read; in memory; only in storage; not on this server for now, so request it again.
PENDING, HERE, IN_STORAGE, ELSEWHERE = range(4)


class RecordStates(msgspec.Struct, frozen=True, tag=True):
    """Answer: the state of each record, one byte each, and which of the records' stripes are completely loaded."""

    states: bytes
    stripes: list[int]
    #: Number of the dataset on this server, a new one if it is dropped and cached again. 0 if it is not held.
    held: int = 0


class CachedDatasetList(msgspec.Struct, frozen=True, tag=True):
    """Answer: the pool's datasets, and its free and total bytes."""

    datasets: list[CachedDataset]
    free: int
    capacity: int


class PoolRefusal(msgspec.Struct, frozen=True, tag=True):
    """Answer: the request was wrong, or cannot be fulfilled. The client raises the error that it names."""

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
    #: tcp://HOST:PORT at which other hosts reach it; None if they cannot.
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
    """Some stripes of a dataset: a follower reports that it holds them, or the leader instructs it to hold them.

    A follower reports all of its datasets before it joins, at most `MAX_STRIPES` stripes in a message; the leader
    answers Acknowledged. An instruction without stripes only updates `is_explicit`.
    """

    source: AnySource
    identity: bytes
    is_explicit: bool
    #: Limit of a record's hash, below which the record has a place in memory; see `layout.resident`.
    cut: int
    stripes: list[int]

    def split(self) -> list[DatasetPart]:
        """Return this part as reports of at most `MAX_STRIPES` stripes each."""
        firsts = range(0, max(1, len(self.stripes)), MAX_STRIPES)
        return [msgspec.structs.replace(self, stripes=self.stripes[first : first + MAX_STRIPES]) for first in firsts]


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answer: the message was accepted."""


class JoinPool(msgspec.Struct, frozen=True, tag=True):
    """Request: join the pool, with the datasets that were reported before. Answered by Acknowledged."""

    server: ServerInfo


#: In place of a count: all records failed, because the dataset's metadata could not be read.
ALL_FAILED = -1


class DatasetState(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's progress with a dataset."""

    identity: bytes
    #: Whether all memory for it is reserved.
    is_placed: bool
    #: Numbers of loaded and of failed records (or `ALL_FAILED`), and of processes that read the dataset there.
    loaded: int
    failed: int
    readers: int
    error: str


class FollowerHeartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: renew a follower's lease. Answered by Instructions after at most `wait_s` seconds.

    It contains only states that have changed. They reflect all instructions of earlier answers.
    """

    states: list[DatasetState]
    wait_s: float


class DropDataset(msgspec.Struct, frozen=True, tag=True):
    """Instruction: drop a dataset, and report the reason to its readers."""

    identity: bytes
    #: `UNLOADED` or `IDLE` of `transport/segments`.
    why: int


class Instructions(msgspec.Struct, frozen=True, tag=True):
    """Answer: instructions for a follower, in order."""

    instructions: list[DatasetPart | DropDataset]


class GetStripeTable(msgspec.Struct, frozen=True, tag=True):
    """Request: get the owners of a dataset's stripes. Answered by StripeTable."""

    identity: bytes


class StripeTable(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer: the owners of a dataset's stripes."""

    #: Number of records in a stripe.
    per_stripe: int
    servers: list[ServerInfo]
    #: For each stripe its owner's index in `servers`, or -1: little-endian 2-byte numbers.
    owners: bytes
    #: Whether some samples have no place in memory; these samples are read ahead if an access plan is announced.
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
