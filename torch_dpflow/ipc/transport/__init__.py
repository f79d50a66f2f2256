"""Messages between processes: `listen` and `connect`, by URL scheme.

``ipc://PATH`` on one host, ``tcp://HOST:PORT`` between hosts, ``inproc://NAME`` inside one process.
An implementation is imported when an address needs it.
"""

from __future__ import annotations

from torch_dpflow._core.checks import check_tcp_address
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.messages.payload_table import Frame
from torch_dpflow.ipc.transport.base import Connection, Listener, TransportOptions, is_loopback

__all__ = ["Connection", "Frame", "Listener", "TransportOptions", "connect", "is_loopback", "listen"]

_DEFAULT = TransportOptions()


def listen(address: str, *, options: TransportOptions = _DEFAULT) -> Listener:
    """Listen at `address`; tcp port 0 takes a free one, which the listener's `address` then names.

    Raises OptionError for an address that is not allowed, TransportError for one that cannot be bound.
    """
    if _scheme(address) == "inproc":
        from torch_dpflow.ipc.transport.inproc import InprocListener

        return InprocListener(address, options)
    from torch_dpflow.ipc.transport.zeromq import ZeroMQListener

    return ZeroMQListener(address, options)


def connect(
    address: str, *, identity: bytes | None = None, options: TransportOptions = _DEFAULT
) -> Connection:
    """Connect to the listener at `address`, which need not exist yet.

    identity: names this connection to the listener, 1 to 255 bytes, unique among its peers; None draws one.
    """
    if _scheme(address) == "inproc":
        from torch_dpflow.ipc.transport.inproc import InprocConnection

        return InprocConnection(address, identity, options)
    from torch_dpflow.ipc.transport.zeromq import ZeroMQConnection

    return ZeroMQConnection(address, identity, options)


def _scheme(address: str) -> str:
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or scheme not in ("ipc", "tcp", "inproc"):
        raise OptionError(f"address={address!r}: must be ipc://PATH, tcp://HOST:PORT or inproc://NAME")
    if scheme == "tcp":
        check_tcp_address("address", address)
    return scheme
