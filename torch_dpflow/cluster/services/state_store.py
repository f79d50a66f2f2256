"""Stores for the state of a coordinator: bytes by key, in SQLite or Redis, behind a copy in memory."""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch_dpflow._core import clocks
from torch_dpflow._core.lazy import imported
from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.errors import OptionError, StateError
from torch_dpflow.log import SERVICE

#: Prefix of every key in Redis, which may hold other data too.
_REDIS_PREFIX = "torch_dpflow:"
#: The key that holds the owner of the store.
_REDIS_OWNER = "torch_dpflow-owner"
#: How long an owner's lease of a store lasts, and the interval at which it is renewed (seconds).
LEASE_S, RENEW_S = 3 * clocks.LEASE_S, 3 * clocks.HEARTBEAT_S
_LEASE_MS = int(LEASE_S * 1000)
#: How often to check whether another owner's lease has expired (seconds).
_POLL_S = 0.2
#: How long Redis may take to answer (seconds).
_ANSWER_S = 5.0
#: How many keys to request from Redis at once.
_REDIS_BATCH = 500


class StateStore(Protocol):
    """Store of bytes by key. A value survives this process after `write` has returned; a write is atomic.

    Any thread may call. Calls raise StateError if the store cannot be reached or is damaged. In a store without leases
    (SQLite), `claim` and `release` do nothing, and `renew` returns True.
    """

    def items(self) -> dict[str, bytes]:
        """Return all values, by key."""

    def write(self, key: str, value: bytes | None) -> None:
        """Set the value of `key`; None removes the key, if it exists."""

    def claim(self, owner: str) -> None:
        """Lease the store to this owner for `LEASE_S` seconds, after waiting for another owner's lease to expire.

        Raises StateError if that owner renews its lease meanwhile.
        """

    def renew(self, owner: str) -> bool:
        """Renew this owner's lease for `LEASE_S`, and return True. If there is no lease, begin one and return False.

        Raises StateError if another owner has the lease.
        """

    def release(self, owner: str) -> None:
        """End the lease if this owner has it."""

    def close(self) -> None:
        """Close the store. Idempotent."""


def open_store(url: str) -> StateStore:
    """Open the store at `url`: a path or sqlite:///PATH; or redis://, rediss:// or unix:// for Redis.

    Raises OptionError for another kind of address, MissingExtraError if the package for Redis is missing, StateError if
    the store cannot be opened.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = "none"
    if scheme in ("", "sqlite"):
        return SQLiteStore(url.removeprefix("sqlite://"))
    if scheme in ("redis", "rediss", "unix"):
        return RedisStore(url)
    raise OptionError(
        f"--state {_without_password(url)!r}: give a path, sqlite:///PATH, redis://HOST:PORT/NUMBER "
        "or unix://PATH of a Redis socket"
    )


class SQLiteStore:
    """Store in a SQLite file, without leases: the caller locks the file to exclude other clusters.

    Args:
        path: path of the file. If it does not exist, it is created so that only this user can read it.

    Raises StateError if the file cannot be opened, or is not a store.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._closed = False
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._broken(error) from error
        try:
            # A write-ahead log loses nothing when the process is killed; a power failure may lose the last writes.
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            self._connection.close()
            raise self._broken(error) from error

    def items(self) -> dict[str, bytes]:
        return {key: bytes(value) for key, value in self._run("SELECT key, value FROM state")}

    def write(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._run("DELETE FROM state WHERE key = ?", key)
        else:
            self._run("INSERT OR REPLACE INTO state VALUES (?, ?)", key, value)

    def claim(self, owner: str) -> None:
        pass  # `local_cluster` locks the file

    def renew(self, owner: str) -> bool:
        return True

    def release(self, owner: str) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._connection.close()

    def _run(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            if self._closed:
                raise StateError(f"the state store {os.fspath(self._path)!r} is closed")
            try:
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise self._broken(error) from error

    def _broken(self, error: Exception) -> StateError:
        return StateError(
            f"the state store {os.fspath(self._path)!r} cannot be used: {error}; give the path of one that "
            "`dpflow up --state` has made, or of no file"
        )


class RedisStore:
    """Store in a Redis server. The configuration of the server decides what survives a crash of the server.

    Args:
        url: address of the server: redis://HOST:PORT/NUMBER, rediss:// with TLS, or unix://PATH.

    Raises:
        MissingExtraError: the package for Redis is not installed.
        OptionError: the address is malformed, or has an unknown option.
        StateError: the server does not answer.
    """

    def __init__(self, url: str) -> None:
        self._url = _without_password(url)
        redis = imported("redis", f"--state {self._url!r} needs the package redis", "redis")
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._error: type[Exception] = redis.RedisError
        # One immediate retry, for a connection that was closed meanwhile; the caller decides about further ones.
        retry = Retry(NoBackoff(), 1)
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S, retry=retry
            )
            self._ask(self._client.ping)
        except StateError:
            self.close()
            raise
        except (ValueError, TypeError):  # a port that is not a number, or an unknown option
            raise OptionError(
                f"--state {self._url!r}: give redis://HOST:PORT/NUMBER or unix://PATH; of options those of the package "
                "redis"
            ) from None

    def items(self) -> dict[str, bytes]:
        keys = self._ask(lambda: set(self._client.scan_iter(match=f"{_REDIS_PREFIX}*", count=_REDIS_BATCH)))
        found = {key.decode().removeprefix(_REDIS_PREFIX): self._ask(self._client.get, key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def write(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._ask(self._client.delete, _REDIS_PREFIX + key)
        else:
            self._ask(self._client.set, _REDIS_PREFIX + key, value)

    def claim(self, owner: str) -> None:
        left_ms = _LEASE_MS + 1
        while not self._is_taken_over(owner):
            before_ms, left_ms = left_ms, self._ask(self._client.pttl, _REDIS_OWNER)
            if left_ms > before_ms or left_ms == -1:  # it was renewed, or does not expire
                raise self._taken()
            if before_ms > _LEASE_MS:
                text = "state store %s is leased to another cluster; waiting %d s for its lease to expire"
                SERVICE.warning(text, self._url, LEASE_S)
            time.sleep(_POLL_S)

    def renew(self, owner: str) -> bool:
        if self._is_taken_over(owner):
            return False
        if self._owner() != owner:
            raise self._taken()
        self._ask(self._client.pexpire, _REDIS_OWNER, _LEASE_MS)
        return True

    def _is_taken_over(self, owner: str) -> bool:
        return bool(self._ask(lambda: self._client.set(_REDIS_OWNER, owner, nx=True, px=_LEASE_MS)))

    def _taken(self) -> StateError:
        return StateError(
            f"another cluster keeps its flows in the state store {self._url!r}; give another one, or another of its "
            "databases: redis://HOST:PORT/NUMBER"
        )

    def release(self, owner: str) -> None:
        if self._owner() == owner:
            self._ask(self._client.delete, _REDIS_OWNER)

    def _owner(self) -> str | None:
        owner: bytes | None = self._ask(self._client.get, _REDIS_OWNER)
        return None if owner is None else owner.decode(errors="replace")

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: Any, *arguments: object) -> Any:
        try:
            return method(*arguments)
        except self._error as error:
            raise StateError(f"the state store {self._url!r} cannot be used: {error}; is it up?") from error


def _without_password(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


class WriteBehindStore:
    """Store in memory, whose changes a thread copies to another store whenever that store can be used.

    A value survives this process once the thread has written it, shortly after `put`. Changes are kept while the other
    store is unavailable; if it has been emptied, all values are written again. One thread calls all methods.

    Args:
        open_store: opens the other store, or raises StateError.
        owner: name under which the other store is leased, see `StateStore.renew`.
    """

    # Written behind, so that an absent store blocks no call. Values put just before this process dies may be lost; a
    # job whose flow is unknown then registers it again.

    def __init__(self, open_store: Callable[[], StateStore], owner: str) -> None:
        self._open_store = open_store
        self._store: StateStore
        self._owner = owner
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        #: Keys whose stored value is out of date.
        self._unwritten: set[str] = set()
        self._awaiting: queue.SimpleQueue[Callable[[Exception | None], None]] = queue.SimpleQueue()
        self._writer = PeriodicCall(self._write, RENEW_S, "dpflow-state", on_error=self._log_failure)
        self._loaded = threading.Event()
        #: Why the store could not be used at the last attempt; None if it could.
        self.failure: Exception | None = None

    def load(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the other store can be used, and read all its values. Call once, before all other methods.

        meanwhile: called repeatedly until then; each call should block for a moment.
        """
        self._writer.wake()
        self._writer.start()
        while not self._loaded.is_set():
            meanwhile()

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def find(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
            self._unwritten.add(key)
        self._writer.wake()

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)
            self._unwritten.add(key)
        self._writer.wake()

    def once_written(self, done: Callable[[Exception | None], None]) -> None:
        """Make the thread call `done(None)` once all values are written, or `done(error)` if the other store fails."""
        self._awaiting.put(done)
        self._writer.wake()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        awaiting = [self._awaiting.get() for _ in range(self._awaiting.qsize())]
        failure: Exception | None = None
        try:
            if not self._loaded.is_set():
                self._read_all()
            self._write_all()
            if self.failure is not None:
                self.failure = None
                SERVICE.warning("state store recovered; all state is written")
        except Exception as error:
            failure = error
            raise
        finally:
            for done in awaiting:
                done(failure)

    def _read_all(self) -> None:
        self._store = self._open_store()
        try:
            self._store.renew(self._owner)
            self._values = self._store.items()
        except BaseException:
            self._store.close()
            raise
        self._loaded.set()

    def _write_all(self) -> None:
        if not self._store.renew(self._owner):
            SERVICE.warning("state store was emptied; all state is written again")
            with self._lock:
                self._unwritten |= self._values.keys()
        with self._lock:
            unwritten = list(self._unwritten)
        for key in unwritten:
            with self._lock:
                self._unwritten.discard(key)
                value = self._values.get(key)
            try:
                self._store.write(key, value)
            except BaseException:
                with self._lock:
                    self._unwritten.add(key)
                raise

    def _log_failure(self, error: Exception) -> None:
        if self.failure is None:
            text = "%s; jobs read on, changes are written once it recovers"
            SERVICE.warning(text, error, exc_info=None if isinstance(error, StateError) else error)
        self.failure = error
