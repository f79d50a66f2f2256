"""Who may talk to a cluster over tcp: CURVE keys and the 0600 file that carries them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """A listener's own key pair and the one client key that it lets in. Keys are Z85 text, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    client_public: bytes


@dataclass(frozen=True, kw_only=True)
class ClientKeys:
    """The cluster's client key pair and the server's public key. Keys are Z85 text, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes
