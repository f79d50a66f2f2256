"""CURVE keys, which authenticate both sides of a tcp connection.

A cluster has a server key pair, by which clients recognise its services, and one client key pair, which is the only one
that the services accept. Both lie in a connection file that only its owner may read; whoever can read it can run code
on the cluster's workers.

Members of a platform get no client key of a cluster: each has one of its own, which a listener with `WorkerKeys` admits
for as long as the member is expected or there.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
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

    def user_of(self, key: bytes) -> str | None:
        """Who has this client key: nobody in particular; None if it is not the key."""
        return "" if hmac.compare_digest(key, self.client_public) else None


class WorkerKeys:
    """A listener's own key pair, and the clients' keys that it admits, each for one user. Thread-safe.

    The identity of a user's connection has to begin with the user's name and "/"; messages of others are dropped, also
    on connections that were admitted before.

    Args:
        public, secret: Z85 text, 40 bytes.
        clock: seconds.
    """

    def __init__(self, *, public: bytes, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        _check_keys(public=public, secret=secret)
        self.public, self.secret = public, secret
        self._clock = clock
        self._lock = threading.Lock()
        #: By key: the user, and until when they may connect, seconds, or None where they have called.
        self._admitted: dict[bytes, tuple[str, float | None]] = {}
        self._keys: dict[str, bytes] = {}

    def expect(self, user: str, key: bytes, for_s: float) -> None:
        """Admit this key of a new user for so many seconds."""
        _check_keys(key=key)
        with self._lock:
            self._keys[user] = key
            self._admitted[key] = user, self._clock() + for_s

    def keep(self, user: str) -> None:
        """This user has called: admit them until they are dropped, since connections may break."""
        with self._lock:
            if user in self._keys:
                self._admitted[self._keys[user]] = user, None

    def drop(self, user: str) -> None:
        """Admit this user no more."""
        with self._lock:
            self._admitted.pop(self._keys.pop(user, b""), None)

    def user_of(self, key: bytes) -> str | None:
        """Who has this key; None if it is not admitted."""
        with self._lock:
            user, until = self._admitted.get(key, (None, None))
            return None if until is not None and self._clock() >= until else user

    def admits(self, user: str, identity: bytes) -> bool:
        """Whether a message of a connection with this identity may be heard, which this user has opened."""
        return user in self._keys and identity.startswith(f"{user}/".encode())


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
