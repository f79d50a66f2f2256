"""The order of a member: all that it is told when it is started."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from torch_dpflow._core.depth import check_json
from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.messages.fields import Count, Name, Seconds

#: Of the fields below, `Order.version`: a member that reads another one cannot go on.
ORDER_VERSION = 1
#: Most bytes of an order, and most addresses in it. All platforms allow that.
MAX_ORDER, MAX_ADDRESSES = 8192, 16

#: A CURVE key, Z85 text.
Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one member is to do, and whom to call. JSON, since it is typed into environments and consoles.

    All times are durations from the member's own start: no two clocks are compared. It carries no credentials. Its key
    is of one member only, and opens nothing once that one has called or `start_within_s` has passed.
    """

    version: Literal[1] = 1
    name: Name
    #: A worker that loads batches, one that loads the single samples of a flow, or a node.
    role: Literal["worker", "sample-worker", "node"]
    number: Count
    incarnation: Count
    #: Where to call, in turn.
    addresses: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    server_public: Key
    public: Key
    secret: Key
    #: How long after its start its key is admitted, seconds.
    start_within_s: Seconds
    #: After how long it leaves by itself, seconds; None: never.
    lifetime_s: Seconds | None
    #: After how long without a message it leaves, seconds.
    silence_s: Seconds
    #: Digests of what it loads and of the code that this needs; empty: none.
    content: str = ""
    code: str = ""
    #: Least level of its log lines.
    log: str = "info"

    def __repr__(self) -> str:
        return (
            f"Order(name={self.name!r}, role={self.role!r})"  # neither logs nor errors may quote the secret
        )


class _Version(msgspec.Struct):
    version: int


def encode_order(order: Order) -> bytes:
    """The bytes of an order. Raises OptionError if they are too many."""
    data = msgspec.json.encode(order)
    if len(data) > MAX_ORDER:
        raise OptionError(
            f"the order of {order.name} has {len(data)} bytes, of at most {MAX_ORDER}; give fewer or shorter addresses"
        )
    return data


def decode_order(data: bytes) -> Order:
    """Read an order. Raises MessageError, which quotes nothing of it."""
    try:
        if len(data) > MAX_ORDER:
            raise MessageError(f"an order of {len(data)} bytes; at most {MAX_ORDER} are allowed")
        check_json(data)
        version = msgspec.json.decode(data, type=_Version).version
        if version != ORDER_VERSION:
            raise MessageError(
                f"an order of version {version}, and this torch_dpflow reads {ORDER_VERSION}: "
                "install the same release where members run"
            )
        return msgspec.json.decode(data, type=Order)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"no order: {error}") from None
