"""Headers of all messages between processes: one typed struct for each kind, encoded with msgpack.

A message is one header frame followed by payload frames, which this module does not parse. A `PayloadTable` in the
header locates an encoded object in these frames and in shared memory. Headers are validated when they are decoded. No
allocation trusts a length that a peer claims: msgspec grows lists as it reads, and a header frame has at most
`MAX_HEADER_BYTES`.

The version is checked once per connection (`Handshake`, `Welcome`), not in every message.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import msgspec.inspect

from torch_dpflow._core.checks import MAX_DEPTH, TOO_DEEP, check_msgpack
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.errors import ErrorKind, MessageError, OptionError
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text
from torch_dpflow.ipc.messages.remote_worker import (
    FetchPiece,
    Piece,
    RemoteHandshake,
    RemoteWelcome,
    WorkerGoodbye,
    WorkerHeartbeat,
)

# --- payload ------------------------------------------------------------------------------------------------

#: Alignment of memory that is allocated for payloads, bytes: a cache line, and the widest vector.
ALIGNMENT = 64
#: The alignment that libzmq usually gives to received frames, bytes. It is enough for all dtypes except numpy's long
#: double, whose frames are copied to other memory.
WORD = 8
#: Data of at least this size goes through shared memory where possible, bytes. For less, the socket is as fast.
SHARED_BYTES = 1 << 15

#: One part of a message.
Frame: TypeAlias = "bytes | bytearray | memoryview"


def aligned(size: int) -> int:
    """Return `size`, rounded up to a multiple of ALIGNMENT."""
    return size + -size % ALIGNMENT


class BlockRef(msgspec.Struct, array_like=True, frozen=True):
    """Location of a published block, as its writer reports it."""

    #: Number of the segment, never used twice by one arena.
    segment: int
    #: The writer's descriptor of the segment.
    fd: int
    #: Bytes of the segment that can hold data.
    capacity: int
    #: Bytes of the segment that hold data.
    nbytes: int
    #: Counts the loans of the segment; a reference can be opened only once.
    generation: int
    #: How many segments the writer has retired so far; when this grows, the reader unmaps the retired ones.
    retired: int


class ProbeRef(msgspec.Struct, array_like=True, frozen=True):
    """Published block that contains a token: a reader that finds this token there can read the arena."""

    token: bytes
    block: BlockRef


class BufferSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Span of one piece of a payload: `size` bytes at `offset` in a frame or a block."""

    #: Number of the frame; or -1 for the first block, -2 for the second, and so on.
    part: int
    offset: int
    size: int


class PayloadTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Locations of a payload's head and buffers in its frames and blocks."""

    #: Number of frames that the payload takes in a message.
    frames: int
    blocks: tuple[BlockRef, ...]
    head: BufferSpan
    #: Spans of the buffers, in the order in which the head uses them; equal spans are the same memory.
    buffers: tuple[BufferSpan, ...]
    #: The alignment that the items in the buffers need, bytes.
    alignment: int = WORD

    @property
    def nbytes(self) -> int:
        """Bytes of the head and the buffers, in frames and in shared memory."""
        places = self.buffers if len(self.buffers) == 1 else set(self.buffers)
        return self.head.size + sum([place.size for place in places])


class PayloadGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Payloads with the same outcome, and the same table except for its block. Part of other headers."""

    #: Number of the task, or the ticket, to which each payload belongs.
    numbers: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=1 << 16)]
    #: Outcome of each payload; the message that contains the group defines the values.
    kind: Annotated[int, msgspec.Meta(ge=0, le=4)]
    payload: PayloadTable
    #: Bytes of each payload's only frame, if these are joined to one frame; 0: each payload has separate frames.
    joined: Count = 0
    #: If the frames are joined, and the table has a block (the first payload's): the blocks of the other payloads.
    blocks: Annotated[list[BlockRef], msgspec.Meta(max_length=1 << 16)] = []

    @property
    def frames_each(self) -> int:
        """Number of frames of each payload, if the payloads are not joined."""
        return self.payload.frames


#: Version of the protocol that these headers form, increased by every change that an older release would misread.
PROTOCOL_VERSION = 7
#: Longest header frame, bytes. Bulk data travels in payload frames.
MAX_HEADER_BYTES = 8 * 1024 * 1024

EMPTY_BODY = msgspec.Raw(b"\xc0")


class Packing(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Encoding of payload frames, if some are compressed or in shared memory. Part of other headers."""

    #: One number for each payload frame, in order. 0: the next frame on the socket. n > 0: the next frame on the
    #: socket, n bytes compressed by snappy. n < 0: the next -n bytes of the shared block, starting at a 64-byte
    #: boundary; frames of `SHARED_BYTES` and more lie before all others.
    frames: Annotated[list[int], msgspec.Meta(max_length=1 << 16)]
    #: A `BlockRef`, msgpack-encoded, or None.
    block: msgspec.Raw = EMPTY_BODY


# --- connection ---------------------------------------------------------------------------------------------


class PayloadOffer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Ways in which the sender can receive large payload frames, and the memory that it shares.

    Part of other headers.
    """

    #: Process id of the sender.
    pid: Count
    #: Whether to compress frames for the sender, because the peers are on different hosts.
    compress: bool = False
    #: A `ProbeRef` of the sender's shared memory, msgpack-encoded; None without any.
    probe: msgspec.Raw = EMPTY_BODY


class Handshake(Body, tag=1):
    """Client to server: open a session. Sent first, and again after `NoSession` or if no `Welcome` arrives.

    In all releases the first field of this and of `Welcome` is the version: `version_of` reads it.
    """

    version: Count
    #: How the server can send payload to the client.
    offer: PayloadOffer


class Welcome(Body, tag=2):
    """Server to client: the answer to `Handshake`. If the versions differ, the client fails all its open calls."""

    version: Count
    #: How the client can send payload to the server.
    offer: PayloadOffer


class NoSession(Body, tag=3):
    """Server to client: the client has no session. Send `Handshake`, then inquire about the open calls."""


class Reading(Body, tag=6):
    """In both directions: the sender can read the receiver's shared memory, so the receiver can put frames there."""


# --- calls --------------------------------------------------------------------------------------------------


class Request(Body, tag=10):
    """Client to server: call `method`. Payload frames follow."""

    #: Counts the client's calls, starting at 1.
    call: Count
    method: Name
    #: How long the client waits from now on, seconds.
    timeout_s: Seconds
    body: msgspec.Raw = EMPTY_BODY
    packing: Packing | None = None


class Reply(Body, tag=11):
    """Server to client: the call's result. Payload frames follow."""

    call: Count
    body: msgspec.Raw = EMPTY_BODY
    packing: Packing | None = None


class Failure(Body, tag=12):
    """Server to client: the call ended with an error."""

    call: Count
    kind: ErrorKind
    text: Text


class Inquiry(Body, tag=13):
    """Client to server: do these calls still run?

    The server answers `Missing` for each call that does not run. A reply in transit arrives before `Missing`, because
    messages keep their order.
    """

    calls: Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]


class Missing(Body, tag=14):
    """Server to client: this call does not run, so the call or its answer was lost; send the call again."""

    call: Count


# --- between a worker and its shard -------------------------------------------------------------------------

#: Outcomes of a task. BATCH: a batch, or rows that were written into an open block. FAILURE: an exception. END: the
#: worker's stream has ended. OPENED: a batch of which the first rows are loaded, in an open block. UNFIT: rows that
#: cannot be written into an open block.
BATCH, FAILURE, END, OPENED, UNFIT = range(5)
#: Maximum numbers of tasks and of results in one message.
MAX_TASKS = 1 << 16


class WorkerHandshake(Body, tag=30):
    """Worker to shard, as first message: the worker has started.

    Later releases only append fields, so that `version_of` can read the version.
    """

    worker: Count
    #: Counts the processes that have had this number.
    incarnation: Count
    pid: Count
    #: Probe of the worker's shared memory; None without any.
    probe: ProbeRef | None
    #: Where the worker records which task it runs (`RunningTask`); None: it records nothing.
    running: BlockRef | None = None
    version: Count = PROTOCOL_VERSION
    #: Whether the worker runs none of the user's code before its first task, so that it sends no `WorkerReady`.
    is_ready: bool = False


class WorkerWelcome(Body, tag=31):
    """Shard to worker: the answer to `WorkerHandshake`. One frame follows: the epoch, or a flow's `GREETING`."""

    #: Whether the shard can read the worker's shared memory.
    shared_memory: bool


class WorkerRefused(Body, tag=38):
    """Shard to worker: exit, because the shard does not accept this worker, or ends it."""

    reason: Text  # empty: the shard ends, which needs no log line


class WorkerReady(Body, tag=36):
    """Worker to shard: the start is complete, and the worker can load tasks.

    This is a separate message, so that no task is suspected if a worker dies during its start, such as in
    `worker_init_fn`.
    """


class WorkerBegun(Body, tag=37):
    """Worker to shard, only from workers with a separate stream: the epoch has begun, or cannot begin.

    One frame follows: a pickled `workers.batches.Begun`.
    """


class EpochBegin(Body, tag=32):
    """Shard to worker: drop all tasks; another epoch begins. One frame follows, as in `WorkerWelcome`."""


class Window(Body, tag=33):
    """Shard to worker: append these tasks to the local queue. One frame follows for each task, or one for all."""

    tasks: Annotated[list[Count], msgspec.Meta(max_length=MAX_TASKS)]
    #: Tasks that other workers take over: drop those tasks that have not begun.
    revoked: Annotated[list[Count], msgspec.Meta(max_length=MAX_TASKS)]
    #: Bytes of each task in the one frame that follows; 0: each has a separate frame.
    joined: Count = 0


class Finished(PayloadGroup):
    """Results with the same outcome: BATCH, FAILURE, END, OPENED or UNFIT.

    Part of `Exchange`; the payloads' frames follow.
    """

    #: Whether the last frame of each result is the state of the worker's own stream.
    has_stream: bool = False

    @property
    def frames_each(self) -> int:
        return self.payload.frames + self.has_stream


class Exchange(Body, tag=34):
    """Worker to shard: all results since the last exchange, and a request for more tasks.

    The results' frames follow.
    """

    finished: Annotated[list[Finished], msgspec.Meta(max_length=MAX_TASKS)]
    #: The task that begins now; None if none is left.
    started: Count | None
    #: Size of each frame before compression, bytes, 0 if it is not compressed; None: no frame is compressed.
    sizes: Annotated[list[Count], msgspec.Meta(max_length=1 << 16)] | None = None
    #: How long loading has taken, by stage, since the last message; None: nothing was loaded.
    times: StageTimes | None = None


class Stop(Body, tag=35):
    """Shard to worker: finish the running task, and end."""


# --- all of them --------------------------------------------------------------------------------------------


Header: TypeAlias = (
    Handshake
    | Welcome
    | NoSession
    | Reading
    | Request
    | Reply
    | Failure
    | Inquiry
    | Missing
    | WorkerHandshake
    | WorkerWelcome
    | WorkerRefused
    | WorkerReady
    | WorkerBegun
    | EpochBegin
    | Window
    | Exchange
    | Stop
    | RemoteHandshake
    | RemoteWelcome
    | FetchPiece
    | Piece
    | WorkerHeartbeat
    | WorkerGoodbye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgpack_decoder(Header)
_fields: msgspec.msgpack.Decoder[list[Any]] = msgpack_decoder(list[Any])
#: By the tag of a handshake or welcome, the place of its version behind the tag, the same in all releases.
_VERSION_AT = {1: 1, 2: 1, 30: 6, 40: 1}

T = TypeVar("T")


def encode(header: Header) -> bytes:
    """Encode a header as a frame. Raises MessageError above `MAX_HEADER_BYTES`."""
    frame = _encoder.encode(header)
    if len(frame) > MAX_HEADER_BYTES:
        raise MessageError(
            f"a {type(header).__name__} header of {len(frame)} bytes: {MAX_HEADER_BYTES} are allowed; "
            "let bulk travel in payload frames"
        )
    return frame


def decode(frame: bytes | bytearray | memoryview) -> Header:
    """Decode the header in an untrusted frame. Raises MessageError if the header is not valid."""
    return _decode(_decoder, frame)


def version_of(frame: bytes | bytearray | memoryview) -> int:
    """Return the protocol version in a handshake or welcome of any release; for other frames, this release's."""
    try:
        fields = _decode(_fields, frame)
        version = fields[_VERSION_AT[fields[0]]]
    except (MessageError, LookupError, TypeError):
        return PROTOCOL_VERSION
    return version if type(version) is int and version >= 0 else PROTOCOL_VERSION


def encode_body(body: object) -> msgspec.Raw:
    """Encode a call's arguments or result as msgpack. Raises OptionError for text that UTF-8 cannot encode."""
    try:
        return EMPTY_BODY if body is None else msgspec.Raw(_encoder.encode(body))
    except UnicodeEncodeError as error:
        raise OptionError(f"{error.object!r:.80} cannot be sent: {error.reason}; give other text") from error


def decode_body(body: msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode `body` as the decoder's type. Raises MessageError if `body` is malformed or of the wrong type."""
    return _decode(decoder, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: msgspec.Raw | bytes | bytearray | memoryview) -> T:
    size = memoryview(data).nbytes
    if size > MAX_HEADER_BYTES:
        raise MessageError(f"a header of {size} bytes: {MAX_HEADER_BYTES} are allowed")
    try:
        value = decoder.decode(data)
        types: tuple[Any, ...] = type(value), decoder.type  # this may be a union, of which few types take any value
        if size > MAX_DEPTH and all(map(_takes_any, types)):  # one level takes a byte at least
            check_msgpack(memoryview(data))
        return value
    except RecursionError:
        raise MessageError(f"not a valid message: {TOO_DEEP}") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise MessageError(f"not a valid message: {error}") from error


@functools.cache
def _takes_any(type_: Any) -> bool:
    """Return whether a type accepts values of any type: only these can be nested to any depth."""
    types = repr(msgspec.inspect.type_info(type_))
    return "AnyType" in types or "RawType" in types
