"""What a server of the pool and its clients on one host say to each other, and where its socket is.

Each message is one packet of a Unix socket (SOCK_SEQPACKET), in MessagePack; regions come with it as descriptors. The
socket lies in a directory of mode 0700, and its owner is the only user who is answered.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from torch_dpflow import errors
from torch_dpflow.errors import DPFlowError


class DatasetSource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A stored dataset whose bytes a set has."""

    #: The directory of the dataset store, and fsspec's options for it.
    store: str
    options: dict[str, Any]
    #: The full name of the variant.
    ref: str
    #: fsspec's options for the data; None: those of the store.
    data_options: dict[str, Any] | None = None


class ArraySource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An array whose rows are the records of a set: in a file of any storage, or pushed by clients.

    `pool.open_array` makes it.
    """

    #: Its name for people.
    ref: str
    #: numpy's name of the type of its elements, and its shape, records first.
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]]
    #: What changes with its content: size and tag or time of the file; a digest of what is pushed.
    stamp: str
    #: The file, and fsspec's options for it; "": it is pushed.
    url: str = ""
    options: dict[str, Any] = {}
    #: Where its first row begins, bytes; in an HDF5 file None, with the path of the dataset in it.
    start: int | None = None
    path: str = ""
    #: Of a further version that is pushed: the set of the older one, and how many stripes it shares with it.
    base: bytes = b""
    shared: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def is_pushed(self) -> bool:
        """Whether there is no storage to read it from."""
        return not self.url


AnySource: TypeAlias = DatasetSource | ArraySource


#: Most records in one message, and in all orders of a set: 2^27 take a GiB.
MAX_ANNOUNCED, MAX_PLAN_RECORDS = 15_000, 1 << 27
#: Records of an order that is extended which are announced and not read, at most: earlier ones are passed over.
MAX_UPCOMING = 1 << 16
#: Most orders of a set; each has its part of the memory.
MAX_PLANS = 4096
#: In the place of a length.
LEFT, COMES = -1, -2


class AnnounceAccessPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Records are read in this order from now on, which comes in parts; answered by Noted.

    Of an earlier order of this name nothing is left unless this extends it, and none of it when the connection ends.
    """

    identity: bytes
    plan: str
    #: The place of the part's first record in the order, and the records of the whole.
    first: int
    total: int
    #: Records that readers ask for between an earlier one and its turn, at most.
    spread: int
    #: Whether they are read after those that this connection has announced by this name, if there are any.
    extends: bool = False
    #: Little-endian numbers of 4 bytes, at most `MAX_ANNOUNCED`.
    records: bytes


class OpenAhead(msgspec.Struct, frozen=True, tag=True):
    """Where this set's records are read ahead; answered by AheadOpened, with the memory."""

    identity: bytes


class GetAheadPlaces(msgspec.Struct, frozen=True, tag=True):
    """These records of an order are needed now, at most `MAX_RECORDS`; answered by AheadPlaces."""

    identity: bytes
    plan: str
    records: list[int]


class ConfirmAhead(msgspec.Struct, frozen=True, tag=True):
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


AheadRequest: TypeAlias = AnnounceAccessPlan | OpenAhead | GetAheadPlaces | ConfirmAhead
AheadAnswer: TypeAlias = AheadOpened | AheadPlaces


def memory_name(memory: int) -> bytes:
    """What lanes call that memory, in the place of a set: its records there are offsets of what lies in it."""
    return memory.to_bytes(16, "big")


#: Most bytes of a message.
MAX_MESSAGE_BYTES = 64 << 10
#: Most records that one message asks for.
MAX_RECORDS = 4096
#: Most regions of a set, which come with one message (SCM_MAX_FD is 253).
MAX_SEGMENTS = 250
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class PreloadDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Hold this set; answered by CachedDataset, which is asked for again until it is placed."""

    source: AnySource
    identity: bytes
    is_explicit: bool
    whole: bool


class StartReading(msgspec.Struct, frozen=True, tag=True):
    """This process reads this set from now on, until the connection ends; answered by Noted."""

    identity: bytes


class OpenDataset(msgspec.Struct, frozen=True, tag=True):
    """Map what this server holds of a set; answered by DatasetOpened, with regions from this one on."""

    identity: bytes
    first: int = 0


class GetRecordStates(msgspec.Struct, frozen=True, tag=True):
    """These records are needed now, at most `MAX_RECORDS`; answered by RecordStates.

    patience_s: how long the answer may wait for those that are on their way, seconds.
    """

    identity: bytes
    records: list[int]
    wait_s: float = 1.0


class PushStripe(msgspec.Struct, frozen=True, tag=True):
    """The rows of a stripe come as sealed memory, one descriptor; answered by RecordStates."""

    identity: bytes
    stripe: int


class CountReads(msgspec.Struct, frozen=True, tag=True):
    """So many more records were read from memory, and from storage. It has no answer, so no reader waits for it."""

    identity: bytes
    hits: _Count
    misses: _Count


class ListDatasets(msgspec.Struct, frozen=True, tag=True):
    """Answered by CachedDatasetList, from the set with this number on."""

    first: int = 0


class UnloadDataset(msgspec.Struct, frozen=True, tag=True):
    """Give up this set; answered by CachedDatasetList."""

    identity: bytes


class CachedDataset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
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


class DatasetOpened(msgspec.Struct, frozen=True, tag=True):
    """Regions come as descriptors, as many as `regions`, of `total` that this server has of the set."""

    segments: int
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


class CachedDatasetList(msgspec.Struct, frozen=True, tag=True):
    """As many sets as one message has room for, and the bytes of the pool that are free and in all."""

    sets: list[CachedDataset]
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
