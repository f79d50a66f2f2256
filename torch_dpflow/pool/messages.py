"""Messages between pool servers and their clients, and among servers, in MessagePack.

A server that joins a pool is a follower. It sends DatasetPart for the datasets that it holds, then JoinPool; the pool's
leader answers both by Acknowledged. Then it repeats FollowerHeartbeat, each answered by Instructions.
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
    """Description of a stored dataset, from which a server opens and caches it."""

    #: Directory of the dataset store, or of indexes, and fsspec's options for it.
    store: str
    options: dict[str, Any]
    #: Full name of the variant.
    ref: str
    #: Whether the dataset is an index that `open_dataset` made.
    is_index: bool = False
    #: fsspec's options for the data; None: the options of the store.
    data_options: dict[str, Any] | None = None


class ArraySource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Description of an array whose rows the pool caches: in a file (`pool.open_array`), or pushed by clients."""

    #: Display name.
    ref: str
    #: numpy's dtype string of the elements, and the shape; its first number counts the rows.
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]]
    #: Text that changes with the content: size and ETag or time of the file; a digest for a pushed array.
    stamp: str
    #: URL of the file, and fsspec's options for it; "" for a pushed array.
    url: str = ""
    options: dict[str, Any] = {}
    #: Byte offset of the first row in a `.npy` file, else None; path of the dataset in an HDF5 file, else empty.
    start: int | None = None
    path: str = ""
    #: For an appended array: identity of the version that it extends, and number of first stripes shared with it.
    base: bytes = b""
    shared: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def is_pushed(self) -> bool:
        """Whether clients push the array, so that no storage has it."""
        return not self.url


AnySource: TypeAlias = DatasetSource | ArraySource

#: Maximum records in one AnnounceAccessPlan, and in all access plans of a dataset together (1 GiB of memory).
MAX_ANNOUNCED, MAX_PLAN_RECORDS = 15_000, 1 << 27
#: Values in place of a record's length: the reader must read it from storage; the server is still reading it.
IN_STORAGE_ONLY, ON_ITS_WAY = -1, -2


class AnnounceAccessPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: announce an access plan, the order in which records will be read, or one part of it.

    The last part replaces an earlier plan of this name, unless it `extends` the plan. Answered by Acknowledged; a part
    with `extends` has no answer, so that no training loop waits. The plan ends with the connection.
    """

    identity: bytes
    plan: str
    #: Position of the part's first record among the announced records, and number of records in all parts.
    first: int
    total: int
    #: Number of positions, up to the furthest requested one, whose records can still be requested.
    spread: int
    #: Whether to append to the plan of this name and connection, if there is one.
    extends: bool = False
    #: Record numbers in reading order, at most `MAX_ANNOUNCED`: 4 bytes each, little-endian.
    records: bytes


class GetAheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """Request: get the places of a plan's records in the server's read-ahead memory, and confirm copies made earlier.

    Answered by AheadPlaces. Each list has at most `MAX_RECORDS` records. The answer confirms that the server had not
    reused the places of the copied records. Without this answer the reader must discard the copies.
    """

    identity: bytes
    plan: str
    records: list[int]
    #: Records that the reader has copied from places in earlier answers on this connection.
    copied: list[int]
    #: Number of the read-ahead memory that the reader has mapped, 0 if none. If the server uses a different one, and is
    #: on the reader's host, the answer comes with a descriptor of it.
    memory: int


class AheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """Answer: offset and length of each record in the server's read-ahead memory with number `memory`, bytes.

    A length can also be `ON_ITS_WAY` or `IN_STORAGE_ONLY`.
    """

    memory: int
    offsets: list[int]
    lengths: list[int]


#: Maximum bytes of a request (from any client), and of an answer (from a server that the client has authenticated).
MAX_MESSAGE_BYTES, MAX_ANSWER_BYTES = 64 << 10, 64 << 20
#: Maximum records that one message requests.
MAX_RECORDS = 4096
#: Maximum segments that come with one message (SCM_MAX_FD is 253).
MAX_SEGMENTS = 250
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class PreloadDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: cache this dataset. Answered by CachedDataset; repeat the request until its `is_placed`."""

    source: AnySource
    identity: bytes
    #: Whether the dataset stays until it is unloaded; otherwise the pool can drop it while no process reads it.
    is_explicit: bool
    #: Whether to refuse a dataset that does not fit completely; otherwise a part is cached.
    whole: bool


class StartReading(msgspec.Struct, frozen=True, tag=True):
    """Request: declare that this process reads the dataset until the connection ends. Answered by Acknowledged."""

    identity: bytes


class OpenDataset(msgspec.Struct, frozen=True, tag=True):
    """Request: get up to `MAX_SEGMENTS` segments of a dataset, from number `first`. Answered by DatasetOpened."""

    identity: bytes
    first: int = 0


class GetRecordStates(msgspec.Struct, frozen=True, tag=True):
    """Request: read these records before others, at most `MAX_RECORDS`, and get their states.

    Answered by RecordStates. wait_s: maximum wait for records still to be read, seconds; limited to 1 by the server.
    """

    identity: bytes
    records: list[int]
    wait_s: float = 1.0


class PushStripe(msgspec.Struct, frozen=True, tag=True):
    """Request: store the rows of a stripe, sent as a descriptor of sealed memory. Answered by RecordStates."""

    identity: bytes
    stripe: int


class CountReads(msgspec.Struct, frozen=True, tag=True):
    """Report: numbers of samples that were in memory and that were not, since the last report. It has no answer."""

    identity: bytes
    hits: _Count
    misses: _Count


class ListDatasets(msgspec.Struct, frozen=True, tag=True):
    """Request: list datasets. Answered by CachedDatasetList."""


class UnloadDataset(msgspec.Struct, frozen=True, tag=True):
    """Request: unload this dataset. Answered by CachedDatasetList."""

    identity: bytes


class CachedDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """State of one dataset or array in the pool."""

    identity: bytes
    ref: str
    url: str
    #: Number of samples, or rows of an array; how many of them have a place in memory, are loaded, and have failed.
    records: int = 0
    placed: int = 0
    loaded: int = 0
    failed: int = 0
    reserved_bytes: int = 0
    #: Whether the dataset stays until it is unloaded.
    is_explicit: bool
    #: Number of processes that read it.
    readers: int = 0
    #: Whether all servers have finished reserving memory for it.
    is_placed: bool = False
    #: Numbers of requested samples that were in memory, and that were not.
    hits: int = 0
    misses: int = 0
    #: Description of a pushed array; None for any other dataset.
    pushed: ArraySource | None = None
    #: First error of reserving memory or reading samples; empty if none.
    error: str = ""


class DatasetOpened(msgspec.Struct, frozen=True, tag=True):
    """Answer: number of segments whose descriptors come with it, and of all segments of the dataset on this server."""

    segments: int
    total: int
    #: Older versions whose segments are sent too, by identity: how many of their first stripes this dataset shares.
    shares: dict[bytes, int] = {}
    #: As in `RecordStates`.
    held: int = 0


#: States of records: still to be read; in memory; only in storage; not on this server for now, so request it again.
PENDING, HERE, IN_STORAGE, ELSEWHERE = range(4)


class RecordStates(msgspec.Struct, frozen=True, tag=True):
    """Answer: the state of each record, one byte each, and which of the records' stripes are completely loaded."""

    states: bytes
    stripes: list[int]
    #: Number of the dataset on this server, a new one each time that the dataset is cached. 0 if it is not held.
    held: int = 0


class CachedDatasetList(msgspec.Struct, frozen=True, tag=True):
    """Answer: the pool's datasets, and its free and total bytes."""

    datasets: list[CachedDataset]
    free: int
    capacity: int


class PoolRefusal(msgspec.Struct, frozen=True, tag=True):
    """Answer: the request was wrong, or cannot be fulfilled. The client raises the error named here."""

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


#: File in a server's directory that only the running server has locked; it contains the server's incarnation.
LOCK_FILE = "lock"
#: Maximum stripes in one report of a follower; more are reported in parts.
MAX_STRIPES = 8192


@cache
def boot_id() -> str:
    """Return an id of this boot of the machine, or the host name if a sandbox hides the id."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one server of a pool."""

    #: Directory of its socket, unique on its host.
    directory: str
    #: Name of its host, and id of the host's boot.
    host: str
    boot: str
    #: tcp://HOST:PORT at which other hosts reach it; None if they cannot.
    listen: str | None = None
    #: Random id of the server's present start, which `LOCK_FILE` contains too; "" for an older release.
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
        """Whether this process can map the server's memory: same machine, and same user.

        False in a container that does not have the server's directory, or has another server at this path.
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
    """One server's progress with a dataset."""

    identity: bytes
    #: False while the server still reserves memory for it.
    is_placed: bool
    #: Numbers of loaded and of failed records (or `ALL_FAILED`), and of processes that read it from this server.
    loaded: int
    failed: int
    readers: int
    error: str


class FollowerHeartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: renew a follower's lease. Answered by Instructions after at most `wait_s` seconds.

    `states` contains only states that have changed. They reflect all instructions that were received before.
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
