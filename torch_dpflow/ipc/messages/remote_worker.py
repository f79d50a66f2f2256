"""Messages between a remote worker and its shard: launch spec, messages of the control connection, and state."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from torch_dpflow._core.checks import check_json
from torch_dpflow._core.decoding import json_decoder
from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text

#: A worker rejects a spec of any other version.
LAUNCH_SPEC_VERSION = 2
#: Maximum bytes of a launch spec, which all platforms allow, and maximum number of addresses in it.
MAX_LAUNCH_SPEC_BYTES, MAX_ADDRESSES = 8192, 16

#: A CURVE key, Z85 text.
Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Launch spec of one remote worker: its role, and where it connects. JSON, to fit into an environment variable.

    All times are durations by the worker's own clock. The spec contains no credentials except a key pair, which admits
    only this worker, and expires if the worker does not connect in time.
    """

    version: Literal[2] = 2
    name: Name
    #: "worker" loads batches; "sample-worker" loads single samples for a flow.
    role: Literal["worker", "sample-worker"]
    number: Count
    incarnation: Count
    #: Where to connect, tried in turn.
    addresses: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    server_public: Key
    public: Key
    secret: Key
    #: After how long the worker ends by itself, seconds; None: never.
    lifetime_s: Seconds | None
    #: After how long without a message of the shard the worker ends, seconds.
    silence_s: Seconds

    def __repr__(self) -> str:
        # Neither logs nor errors may quote the secret.
        return f"LaunchSpec(name={self.name!r}, role={self.role!r})"


class _Version(msgspec.Struct):
    version: int


def encode_launch_spec(spec: LaunchSpec) -> bytes:
    """Encode a launch spec as JSON. Raises OptionError if that is longer than `MAX_LAUNCH_SPEC_BYTES`."""
    return checked_launch_spec(spec.name, msgspec.json.encode(spec))


def checked_launch_spec(name: str, data: bytes) -> bytes:
    """Return `data`, or raise OptionError if it is longer than `MAX_LAUNCH_SPEC_BYTES`. name: the worker's name."""
    if len(data) > MAX_LAUNCH_SPEC_BYTES:
        raise OptionError(
            f"the launch spec of {name} has {len(data)} bytes; at most {MAX_LAUNCH_SPEC_BYTES} are allowed: give fewer "
            "or shorter addresses"
        )
    return data


def decode_launch_spec(data: bytes) -> LaunchSpec:
    """Decode a launch spec. Raises MessageError if it is invalid; the error's text does not contain its secrets."""
    try:
        if len(data) > MAX_LAUNCH_SPEC_BYTES:
            raise MessageError(f"a launch spec of {len(data)} bytes; at most {MAX_LAUNCH_SPEC_BYTES} are allowed")
        check_json(data)
        version = json_decoder(_Version).decode(data).version
        if version != LAUNCH_SPEC_VERSION:
            raise MessageError(
                f"a launch spec of version {version}; this torch_dpflow reads version {LAUNCH_SPEC_VERSION}: install "
                "the same release where remote workers run"
            )
        found: LaunchSpec = json_decoder(LaunchSpec).decode(data)
        return found
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"not a launch spec: {error}") from None


class RemoteWorkerView(Body):
    """State of a remote worker, as its shard reports it.

    Defined here so that the command line need not import `remote`.
    """

    name: Name
    #: The worker's number in the shard.
    number: Count
    #: As in `fleet.worker_states.WorkerState`.
    state: Name
    #: Seconds since its start was requested.
    age_s: Seconds
    #: Host and process of the worker; empty before it has connected.
    where: Text
    #: For a flow: number of results that the shard has received from it; 0 if it is not working.
    samples: Count = 0


# A remote worker has two connections. A separate thread serves the first: handshake, download of what it loads,
# heartbeats. On the other it is a worker like any. `WorkerRefused` may arrive on the first at any time.

#: Maximum bytes of one piece of a content, and maximum names in a handshake.
PIECE_BYTES, MAX_NAMES = 4 << 20, 256

#: Names and versions.
_Short = Annotated[str, msgspec.Meta(max_length=128)]


class RemoteHandshake(Body, tag=40):
    """Remote worker to shard, as first message, repeated until it is answered.

    In all releases its first field is the version: `version_of` reads it.
    """

    version: Count
    #: Versions of installed distributions, by their names, and of "python".
    versions: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=MAX_NAMES)]
    #: Host and process of the worker, for display.
    where: _Short = ""


class RemoteWelcome(Body, tag=41):
    """Shard to remote worker: fetch the contents with these digests. An empty digest: nothing to fetch."""

    #: Digest and size of what the worker loads.
    content: _Short
    nbytes: Count
    #: Digest and size of the modules that this content needs.
    code: _Short
    code_nbytes: Count


class FetchPiece(Body, tag=42):
    """Remote worker to shard: send the piece of this content at this offset."""

    digest: _Short
    offset: Count


class Piece(Body, tag=43):
    """Shard to remote worker: a piece of a content. One frame follows, at most `PIECE_BYTES` long."""

    digest: _Short
    offset: Count


class WorkerHeartbeat(Body, tag=44):
    """Heartbeat of a remote worker to its shard, and the shard's answer to it."""

    #: Number of messages that the worker has sent so far on its connection for tasks; 0 in the answer.
    sent: Count
    #: Number of messages that it has received there; None while its main thread is busy and may not have read all.
    received: Count | None = None
    #: The round-trip time of an earlier heartbeat, and how long in total the worker was idle because of its network.
    round_trip_s: Seconds = 0.0
    away_s: Seconds = 0.0
    #: The module that the worker imports while it starts, as text; empty afterwards.
    importing: Text = ""


class WorkerGoodbye(Body, tag=45):
    """Remote worker to shard, as last message: the worker ends now."""

    #: The error that ended the worker, as a traceback; empty without such an error.
    report: Text
    #: Number of messages that the worker has sent on its connection for tasks.
    sent: Count
    #: Missing modules without which the worker cannot load the content.
    missing: Annotated[list[_Short], msgspec.Meta(max_length=MAX_NAMES)] = []
