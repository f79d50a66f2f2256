"""CURVE keys, which authenticate both sides of a tcp connection.

A cluster has a server key pair, by which clients recognise its services, and one client key pair, which is the only one
that the services accept. Both lie in a connection file that only its owner may read; whoever can read it can run code
on the cluster's workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_dpflow.errors import OptionError

#: Length of a key in Z85 text, bytes.
KEY_BYTES = 40


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """A listener's own key pair and the one client key that it accepts. Keys are Z85 text, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    client_public: bytes

    def __post_init__(self) -> None:
        _check_keys(public=self.public, secret=self.secret, client_public=self.client_public)


@dataclass(frozen=True, kw_only=True)
class ClientKeys:
    """The cluster's client key pair and the server's public key. Keys are Z85 text, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes

    def __post_init__(self) -> None:
        _check_keys(public=self.public, secret=self.secret, server_public=self.server_public)


def _check_keys(**keys: bytes) -> None:
    for name, key in keys.items():
        if len(key) != KEY_BYTES:
            raise OptionError(f"{name} has {len(key)} bytes: a CURVE key is {KEY_BYTES} bytes of Z85 text")
