"""The launch spec of a remote worker, which it receives at start, and its state for display."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from torch_dpflow._core.depth import check_json
from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text

#: A worker rejects a spec of any other version.
LAUNCH_SPEC_VERSION = 1
#: Maximum bytes of a launch spec, and maximum addresses in it. All platforms allow that.
MAX_LAUNCH_SPEC_BYTES, MAX_ADDRESSES = 8192, 16

#: A CURVE key, Z85 text.
Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Task of one remote worker, and where it connects. JSON, because it is copied into environments.

    All times are durations from the worker's own start: no two clocks are compared. The spec carries no credentials.
    Its key admits this worker only, and expires after `start_within_s` unless the worker has connected.
    """

    version: Literal[1] = 1
    name: Name
    #: A worker that loads batches, one that loads the single samples of a flow, or a node.
    role: Literal["worker", "sample-worker", "node"]
    number: Count
    incarnation: Count
    #: Where to connect, tried in turn.
    addresses: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    server_public: Key
    public: Key
    secret: Key
    #: How long after its start its key is accepted, seconds.
    start_within_s: Seconds
    #: After how long it ends by itself, seconds; None: never.
    lifetime_s: Seconds | None
    #: After how long without a message it ends, seconds.
    silence_s: Seconds
    #: Digests of what it loads and of the code that this needs; empty: none.
    content: str = ""
    code: str = ""
    #: Minimum level of its log lines.
    log: str = "info"

    def __repr__(self) -> str:
        # Neither logs nor errors may quote the secret.
        return f"LaunchSpec(name={self.name!r}, role={self.role!r})"


class _Version(msgspec.Struct):
    version: int


def encode_launch_spec(spec: LaunchSpec) -> bytes:
    """Encode a launch spec as JSON. Raises OptionError above `MAX_LAUNCH_SPEC_BYTES`."""
    data = msgspec.json.encode(spec)
    if len(data) > MAX_LAUNCH_SPEC_BYTES:
        raise OptionError(
            f"the launch spec of {spec.name} has {len(data)} bytes; at most {MAX_LAUNCH_SPEC_BYTES} are allowed: "
            "give fewer or shorter addresses"
        )
    return data


def decode_launch_spec(data: bytes) -> LaunchSpec:
    """Decode a launch spec. Raises MessageError, which quotes nothing of it."""
    try:
        if len(data) > MAX_LAUNCH_SPEC_BYTES:
            raise MessageError(f"a launch spec of {len(data)} bytes; at most {MAX_LAUNCH_SPEC_BYTES} are allowed")
        check_json(data)
        version = msgspec.json.decode(data, type=_Version).version
        if version != LAUNCH_SPEC_VERSION:
            raise MessageError(
                f"a launch spec of version {version}; this torch_dpflow reads version {LAUNCH_SPEC_VERSION}: install "
                "the same release where remote workers run"
            )
        return msgspec.json.decode(data, type=LaunchSpec)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"not a launch spec: {error}") from None


class RemoteWorkerView(Body):
    """State of a remote worker as its shard reports it. Defined here so that printing it imports no package above."""

    name: Name
    #: Its place among the workers of the shard.
    number: Count
    #: As of `RemoteWorkerState`.
    state: Name
    #: Seconds since its start was requested.
    age_s: Seconds
    #: Its host and process; empty before it has connected.
    where: Text
    #: How many samples the shard has received from it.
    samples: Count = 0
