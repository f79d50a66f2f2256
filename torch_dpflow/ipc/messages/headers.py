"""Every header that crosses a process boundary: one typed struct each, encoded with msgpack.

A message is one header frame followed by payload frames, which this module does not parse. Headers are validated when
they are decoded: types, ranges, lengths, no unknown fields. No allocation trusts a length that a peer claims: msgspec
grows lists as it reads, and a header frame has at most `MAX_HEADER_BYTES`.

The version is checked once per connection (`Handshake`, `Welcome`), not in every message.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from torch_dpflow._core.depth import check_msgpack
from torch_dpflow.errors import ErrorKind, MessageError, OptionError
from torch_dpflow.ipc.messages.fields import Count, Name, Seconds, Text
from torch_dpflow.ipc.messages.payload_table import BlockRef, PayloadTable, ProbeRef

#: Raised by every change that an older release would misread.
PROTOCOL_VERSION = 4
#: Longest header frame, bytes. Bulk data travels in payload frames.
MAX_HEADER_BYTES = 8 * 1024 * 1024

EMPTY_BODY = msgspec.Raw(b"\xc0")


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A header: an array on the wire, led by the integer tag; unknown fields are an error."""


# --- payload ------------------------------------------------------------------------------------------------


class Packing(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """How payload frames travel if some are compressed or in shared memory. Part of other headers."""

    #: One number for each payload frame, in order. 0: the next frame on the socket. n > 0: the next frame on the
    #: socket, n bytes compressed by snappy. n < 0: the next -n bytes of the shared block, from a 64-byte boundary on;
    #: frames of `SHARED_BYTES` and more lie before all others.
    frames: Annotated[list[int], msgspec.Meta(max_length=1 << 16)]
    #: A `BlockRef`, msgpack-encoded, or None.
    block: msgspec.Raw = EMPTY_BODY


# --- connection ---------------------------------------------------------------------------------------------


class PayloadOffer(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """How the sender can receive large payload frames, and which memory it shares."""

    #: The sender's process.
    pid: Count
    #: Whether to compress what is sent to it, because the peers are on different hosts.
    compress: bool = False
    #: A `ProbeRef` of the sender's shared memory, msgpack-encoded; None without any.
    probe: msgspec.Raw = EMPTY_BODY


class Handshake(_Header, tag=1):
    """Client to server, first on every connection and again after `NoSession`.

    In all releases the first field of this and of `Welcome` is the version: `version_of` reads it.
    """

    version: Count
    #: How the server's payload may travel.
    offer: PayloadOffer


class Welcome(_Header, tag=2):
    """Server to client: the answer to `Handshake`. A client of another version disconnects."""

    version: Count
    #: Drawn when the server starts, 16 bytes. A new one means that the server has restarted and has no calls.
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    #: How the client's payload may travel.
    offer: PayloadOffer


class NoSession(_Header, tag=3):
    """Server to client: the session does not exist, or no longer. Send `Handshake`, then repeat the open calls."""


class Reading(_Header, tag=6):
    """Either way: the sender can read the receiver's shared memory, and accepts large frames in it."""


# --- calls --------------------------------------------------------------------------------------------------


class Request(_Header, tag=10):
    """Client to server: call `method`. Payload frames follow."""

    #: Counts the client's calls from 1 on.
    call: Count
    method: Name
    #: Every lower call is answered or abandoned: the server may drop its reply.
    completed_below: Count
    #: Higher calls that were answered or abandoned since the previous request.
    answered: Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]
    #: How long the client waits from now on, seconds.
    timeout_s: Seconds
    body: msgspec.Raw = EMPTY_BODY
    packing: Packing | None = None


class Reply(_Header, tag=11):
    """Server to client: the call's result. Payload frames follow."""

    call: Count
    body: msgspec.Raw = EMPTY_BODY
    packing: Packing | None = None


class Failure(_Header, tag=12):
    """Server to client: the call ended with an error."""

    call: Count
    kind: ErrorKind
    text: Text


class Inquiry(_Header, tag=13):
    """Client to server.

    Report the state of these calls. `Reply`, `Failure` or `Missing` answers each that does not run.
    """

    calls: Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]


class Missing(_Header, tag=14):
    """Server to client: this call was never received; send it again."""

    call: Count


# --- between a worker and its shard -------------------------------------------------------------------------

#: The outcome of a task: a batch, an exception, or the end of the worker's stream.
BATCH, FAILURE, END = range(3)
#: Maximum tasks, and most results, in one message.
MAX_TASKS = 1 << 16


class WorkerHandshake(_Header, tag=30):
    """Worker to shard, its first message: it has started.

    Releases only append fields after `version`: `version_of` reads it.
    """

    worker: Count
    #: Counts the processes that have had this number.
    incarnation: Count
    pid: Count
    #: Of the worker's shared memory; None without any.
    probe: ProbeRef | None
    #: Where the worker writes which task it runs (`RunningTask`); None if it does not.
    running: BlockRef | None = None
    version: Count = PROTOCOL_VERSION


class WorkerWelcome(_Header, tag=31):
    """Shard to worker: the answer to `WorkerHandshake`. One frame follows: the epoch, as the requester describes it."""

    #: Whether the worker's shared memory can be read here.
    shared_memory: bool


class WorkerRefused(_Header, tag=38):
    """Shard to worker: end, because this shard has no such worker, or no longer, or the release differs."""

    reason: Text  # empty: the shard ends, which needs no log line


class WorkerReady(_Header, tag=36):
    """Worker to shard: the epoch of `WorkerWelcome` has begun; the worker can load tasks.

    A separate message, so that no task is suspected if a worker dies during its own start, as in `worker_init_fn`.
    """


class WorkerBegun(_Header, tag=37):
    """Worker to shard: where its own stream begins in the epoch. One frame follows: `Begun`."""


class EpochBegin(_Header, tag=32):
    """Shard to worker: drop all tasks; another epoch begins. One frame follows, as of `WorkerWelcome`."""


class Window(_Header, tag=33):
    """Shard to worker: append these tasks to the queue. One frame follows for each."""

    tasks: Annotated[list[Count], msgspec.Meta(max_length=MAX_TASKS)]
    #: Tasks that others take over: drop those that have not begun.
    revoked: Annotated[list[Count], msgspec.Meta(max_length=MAX_TASKS)]


class Finished(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One result. Part of `Exchange`; the frames of its payload follow the header, then that of its stream's state."""

    task: Count
    #: BATCH, FAILURE or END.
    kind: Annotated[int, msgspec.Meta(ge=BATCH, le=END)]
    payload: PayloadTable
    #: Whether its last frame is the state of the worker's own stream.
    has_stream: bool


class Exchange(_Header, tag=34):
    """Worker to shard: all results since the last one, and a request for more tasks. Frames of the results follow."""

    finished: Annotated[list[Finished], msgspec.Meta(max_length=MAX_TASKS)]
    #: The task that begins now; None if none is left.
    started: Count | None
    #: From another host: for each frame its size before compression, bytes, or 0; None: no frame is compressed.
    sizes: Annotated[list[Count], msgspec.Meta(max_length=1 << 16)] | None = None


class Stop(_Header, tag=35):
    """Shard to worker: finish the running task, and end."""


# --- between a remote worker and its shard -----------------------------------------------------------

# A remote worker has two connections. A thread of its own serves the first: handshake, download of what it loads,
# heartbeats. On the other it is a worker like any. `WorkerRefused` may arrive on the first at any time.

#: Maximum bytes of one piece of a content, and maximum names in a handshake.
PIECE_BYTES, MAX_NAMES = 4 << 20, 256

#: Names and versions.
_Short = Annotated[str, msgspec.Meta(max_length=128)]


class RemoteHandshake(_Header, tag=40):
    """Remote worker to shard, first, and again until it is answered.

    In all releases its first field is the version: `version_of` reads it.
    """

    version: Count
    #: By the name of an installed distribution; also "python".
    versions: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=MAX_NAMES)]
    #: Digests of contents that it has already.
    has: Annotated[list[_Short], msgspec.Meta(max_length=MAX_NAMES)]
    #: Its host and process, for display.
    where: _Short = ""


class RemoteWelcome(_Header, tag=41):
    """Shard to remote worker: fetch these contents, by their digests. An empty digest means none."""

    #: What it loads, and its size.
    content: _Short
    nbytes: Count
    #: The modules that this needs.
    code: _Short
    code_nbytes: Count


class FetchPiece(_Header, tag=42):
    """Remote worker to shard: send the piece of this content at this offset."""

    digest: _Short
    offset: Count


class Piece(_Header, tag=43):
    """Shard to remote worker: a piece of a content. One frame follows, at most `PIECE_BYTES` long."""

    digest: _Short
    offset: Count


class MissingModules(_Header, tag=46):
    """Remote worker to shard: it lacks these modules and cannot load the content. `WorkerRefused` answers it."""

    modules: Annotated[list[_Short], msgspec.Meta(max_length=MAX_NAMES)]


class WorkerHeartbeat(_Header, tag=44):
    """Remote worker to shard, periodically, and the shard's answer."""

    #: Messages sent on the other connection so far. If a receiver has fewer for some time, one was lost.
    sent: Count
    #: Of the worker, seconds: round trip of an earlier heartbeat, and how long it has waited for its link.
    round_trip_s: Seconds = 0.0
    away_s: Seconds = 0.0


class WorkerGoodbye(_Header, tag=45):
    """Remote worker to shard, its last message: it ends now."""

    #: Why, as a traceback; empty if it was requested.
    report: Text
    #: Messages that it has sent on the other connection.
    sent: Count


# --- all of them --------------------------------------------------------------------------------------------


class _AnyHandshake(msgspec.Struct, array_like=True, tag=1):
    """Common fields of the `Handshake`s of all releases."""

    version: Count


class _AnyWelcome(msgspec.Struct, array_like=True, tag=2):
    version: Count


class _AnyRemoteHandshake(msgspec.Struct, array_like=True, tag=40):
    version: Count


class _AnyWorkerHandshake(msgspec.Struct, array_like=True, tag=30):
    worker: Any
    incarnation: Any
    pid: Any
    probe: Any
    running: Any
    version: Count


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
    | MissingModules
    | WorkerHeartbeat
    | WorkerGoodbye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)
_AnyGreeting: TypeAlias = _AnyHandshake | _AnyWelcome | _AnyWorkerHandshake | _AnyRemoteHandshake
_greetings: msgspec.msgpack.Decoder[_AnyGreeting] = msgspec.msgpack.Decoder(_AnyGreeting)

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
    """Decode the header in `frame`, which may hold anything. Raises MessageError unless it is valid."""
    return _decode(_decoder, frame)


def version_of(frame: bytes | bytearray | memoryview) -> int:
    """Return the sender's protocol version, from a handshake of any release; this release's for other frames."""
    try:
        return _decode(_greetings, frame).version
    except MessageError:
        return PROTOCOL_VERSION


def encode_body(body: object) -> msgspec.Raw:
    """Encode a call's arguments or result as msgpack. Raises OptionError for text without a UTF-8 encoding."""
    try:
        return EMPTY_BODY if body is None else msgspec.Raw(_encoder.encode(body))
    except UnicodeEncodeError as error:
        raise OptionError(f"{error.object!r:.80} cannot be sent: {error.reason}; give other text") from error


def decode_body(body: msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode `body` as the decoder's type. Raises MessageError for anything else."""
    return _decode(decoder, body)


def body_decoder(body_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for bodies of `body_type`: a struct, a builtin, or Any."""
    return msgspec.msgpack.Decoder(body_type)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: msgspec.Raw | bytes | bytearray | memoryview) -> T:
    size = memoryview(data).nbytes
    if size > MAX_HEADER_BYTES:
        raise MessageError(f"a header of {size} bytes: {MAX_HEADER_BYTES} are allowed")
    try:
        check_msgpack(memoryview(data))
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise MessageError(f"not a valid message: {error}") from error
