"""Messages between processes: ``ipc://PATH`` on one host, ``tcp://HOST:PORT`` between hosts.

ZeroMQ is imported when the first listener or connection is made.
"""

from __future__ import annotations

from torch_dpflow._core.checks import check_tcp_address
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.messages.headers import Frame
from torch_dpflow.ipc.transport.base import Connection, Listener, TransportOptions, check_frames, is_refused

__all__ = ["Connection", "Frame", "Listener", "TransportOptions", "check_frames", "connect", "is_refused", "listen"]

_DEFAULT = TransportOptions()


def listen(address: str, *, options: TransportOptions = _DEFAULT) -> Listener:
    """Listen at `address`. With tcp port 0, a free port is chosen; the listener's `address` contains it.

    Raises OptionError if the address is not allowed, TransportError if it cannot be bound.
    """
    _check_address(address)
    from torch_dpflow.ipc.transport.zeromq import ZeroMQListener

    return ZeroMQListener(address, options)


def connect(address: str, *, identity: bytes | None = None, options: TransportOptions = _DEFAULT) -> Connection:
    """Connect to the listener at `address`. The listener may start later.

    identity: identity of this connection, 1 to 255 bytes, unique among the listener's peers. None: random.

    Raises OptionError for an `address` or `identity` that is not allowed.
    """
    _check_address(address)
    from torch_dpflow.ipc.transport.zeromq import ZeroMQConnection

    return ZeroMQConnection(address, identity, options)


def _check_address(address: str) -> None:
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or scheme not in ("ipc", "tcp"):
        raise OptionError(f"address={address!r}: must be ipc://PATH or tcp://HOST:PORT")
    if scheme == "tcp":
        check_tcp_address("address", address)
