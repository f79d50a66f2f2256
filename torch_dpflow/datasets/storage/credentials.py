"""Access keys from options, the environment or the vendors' own files, in this order."""

from __future__ import annotations

import configparser
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import AccessDeniedError, UsageError


@dataclass(frozen=True)
class Credentials:
    """An access key, and the security token that belongs to it if it is temporary."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


#: What names of options for secrets have in them, for all file systems that fsspec knows.
_SECRET = (
    "secret",
    "token",
    "pass",
    "_key",
    "pkey",
    "cred",
    "connection_string",
    "auth",
    "cookie",
    "signature",
)
#: Names of secrets that would have others in them that are none, such as `key_filename`.
_SECRET_ENDS = ("customerkey", "apikey", "accesskey", "privatekey", "sharedkey", "key_content")
#: Values of `token` that name a source, for gcsfs.
_SOURCES = frozenset({"anon", "google_default", "cloud", "cache", "browser"})
#: Belongs to a secret, and is of no use without it.
_ACCOMPANIES = "key"

#: What becomes of keys of a storage in objects that are pickled.
_KeysAre = Literal["written", "refused", "left out"]
_keys_are: ContextVar[_KeysAre] = ContextVar("keys_are", default="written")
#: Names of options that were left out of what this process has unpickled.
_left_out: set[str] = set()


@contextmanager
def kept_out() -> Iterator[None]:
    """Have objects that hold keys of a storage refuse to be pickled: others may read what is written meanwhile."""
    with _keys("refused"):
        yield


@contextmanager
def left_out() -> Iterator[None]:
    """Have objects that hold keys of a storage be pickled without: who unpickles them is to have his own."""
    with _keys("left out"):
        yield


@contextmanager
def _keys(are: _KeysAre) -> Iterator[None]:
    before = _keys_are.set(are)
    try:
        yield
    finally:
        _keys_are.reset(before)


def to_pickle(options: Mapping[str, Any]) -> Any:
    """These storage options as they are to be pickled: an object that unpickles to a mapping.

    Raises UsageError in `kept_out` if there are keys among them.
    """
    are = _keys_are.get()
    if are == "written":
        return options
    names: set[str] = set()
    rest = _without_keys(options, names)
    if are == "left out":
        return _Rest(rest, sorted(names)) if names else rest
    names.discard(_ACCOMPANIES)
    if names:
        raise UsageError(
            f"storage_options {sorted(names)} would be written with it; leave them out, and give keys by the "
            "environment of whoever reads it (AWS_ACCESS_KEY_ID, OSS_ACCESS_KEY_ID and so on) or by the vendor's own "
            "files"
        )
    return options


def about_left_out() -> str:
    """What to add to an error for missing or refused credentials, where that may be the reason; else nothing."""
    if not _left_out:
        return ""
    return (
        f"; storage_options {sorted(_left_out)} of the training process were not sent to this worker, as keys never "
        "are: give it some of its own, by a role of its machine or function, the environment (AWS_ACCESS_KEY_ID, "
        "OSS_ACCESS_KEY_ID and so on) or the vendor's files"
    )


@dataclass(frozen=True)
class _Rest:
    """Storage options without keys; unpickles to these, and the process remembers what they lack."""

    options: Any
    names: Sequence[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remember, (self.options, self.names)


def _remember(options: Any, names: Sequence[str]) -> Any:
    _left_out.update(names)
    return options


def _without_keys(value: Any, names: set[str]) -> Any:
    """A copy without secrets, whose names are noted."""
    if isinstance(value, Mapping):
        pairs = [pair for pair in value.items() if not _is_secret_pair(pair, names)]
        return {name: _without_keys(inner, names) for name, inner in pairs}
    if isinstance(value, tuple | list):
        kept = [inner for inner in value if not _is_secret_pair(inner, names)]
        return type(value)(_without_keys(inner, names) for inner in kept)
    if isinstance(value, str) and without_login(value) != value:
        names.add("user and password of a URL")
        return without_login(value)
    return value


def _is_secret_pair(pair: Any, names: set[str]) -> bool:
    """Whether this is a secret's name and the secret, as also headers may be given; the name is noted."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    if not _is_secret(*pair):
        return False
    names.add(pair[0])
    return True


def _is_secret(name: str, value: Any) -> bool:
    low = name.lower().replace("-", "_")
    if not value or isinstance(value, bool) or (isinstance(value, str) and value in _SOURCES):
        return False
    return low == _ACCOMPANIES or any(part in low for part in _SECRET) or low.endswith(_SECRET_ENDS)


class CredentialChain(Protocol):
    """A vendor's library that finds credentials in further places, and renews them before they expire."""

    def get(self) -> Credentials | None:
        """The valid credentials."""

    def renew(self) -> None:
        """Look them up again."""


class CredentialSource:
    """Credentials that are looked up once, and again when the storage refuses them. Thread-safe.

    Args:
        find: looks them up cheaply; called again whenever a key is refused.
        chain: used if `find` finds none.
    """

    def __init__(self, find: Callable[[], Credentials | None], chain: CredentialChain | None = None) -> None:
        self._find = find
        self._chain = chain
        self._lock = threading.Lock()
        self._found = find()

    def get(self) -> Credentials | None:
        """The credentials found last."""
        return self._found if self._found is not None or self._chain is None else self._chain.get()

    def renew(self, used: Credentials | None) -> Credentials | None:
        """Other credentials than `used`, which were refused; None: there are none.

        If many threads were refused at once, one looks them up for all.
        """
        with self._lock:
            if self.get() == used:
                self._found = self._find()
                if self._found is None and self._chain is not None:
                    self._chain.renew()
            found = self.get()
        return None if found == used else found


def find_s3_credentials(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """The credentials in `options` (`key`, `secret`, `token`), AWS_* variables or the shared files."""
    return (
        _from(options, "key", "secret", "token")
        or _from(environ, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        or _from_aws_files(environ)
    )


def find_oss_credentials(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """The credentials in `options` (as for S3), OSS_* variables, ALIBABA_CLOUD_* variables or ossutil's file."""
    return (
        _from(options, "key", "secret", "token")
        or _from(environ, "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN")
        or _from(
            environ,
            "ALIBABA_CLOUD_ACCESS_KEY_ID",
            "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
            "ALIBABA_CLOUD_SECURITY_TOKEN",
        )
        or _from(ossutil_settings(environ), "accesskeyid", "accesskeysecret", "ststoken")
    )


def no_credentials(url: str, how: str) -> AccessDeniedError:
    """The error for a private object without any credentials; `how` names the settings for them."""
    return AccessDeniedError(
        f"{url}: no credentials were found; set {how}, give storage_options with 'key' and 'secret', "
        f"or with 'anon': True for a public bucket{about_left_out()}"
    )


def aws_setting(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """One setting of the chosen profile in AWS's shared configuration, such as `region`."""
    profile = environ.get("AWS_PROFILE", "default")
    for section in (f"profile {profile}", profile):
        for parser in _aws_files(environ):
            if parser.has_option(section, name):
                return parser.get(section, name)
    return None


def nested_aws_setting(
    name: str, environ: Mapping[str, str] = os.environ, section: str | None = None
) -> Mapping[str, str]:
    """The settings below one of a profile, or of another `section`, such as those of `s3 =`; empty without it."""
    if section is None:
        found = aws_setting(name, environ)
    else:
        texts = (parser.get(section, name, fallback=None) for parser in _aws_files(environ))
        found = next(filter(None, texts), None)
    pairs = [line.partition("=") for line in (found or "").splitlines() if "=" in line]
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def ossutil_settings(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The settings of ossutil's configuration file, by lower-case name; empty without one."""
    path = os.path.join(environ.get("HOME", ""), ".ossutilconfig")
    parser = _read(path)
    return dict(parser["Credentials"]) if parser.has_section("Credentials") else {}


def _from(source: Mapping[str, Any], key_id: str, secret: str, token: str) -> Credentials | None:
    if source.get(key_id) and source.get(secret):
        return Credentials(str(source[key_id]), str(source[secret]), source.get(token) or None)
    return None


def _from_aws_files(environ: Mapping[str, str]) -> Credentials | None:
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return _from({name: aws_setting(name, environ) for name in names}, *names)


def _aws_files(environ: Mapping[str, str]) -> Iterator[configparser.RawConfigParser]:
    home = os.path.join(environ.get("HOME", ""), ".aws")
    yield _read(environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.join(home, "credentials"))
    yield _read(environ.get("AWS_CONFIG_FILE") or os.path.join(home, "config"))


def _read(path: str) -> configparser.RawConfigParser:
    """A configuration file; read again only if it has changed, because each refused key calls this."""
    try:
        found = os.stat(path)
    except OSError:
        return configparser.RawConfigParser()
    return _parsed(path, found.st_ino, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(path: str, *_version: int) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return configparser.RawConfigParser()  # another tool's file, which reports its errors itself
    return parser


#: Seconds between two look-ups: each may wait for servers that do not exist, and reading a forbidden object must not
#: cause one each time.
_LOOK_UP_AGAIN_S = 60.0


class BotocoreChain:
    """Credentials of botocore's chain, which it renews before they expire. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Any = None
        self._looked_up: float | None = None

    def get(self) -> Credentials | None:
        """The valid credentials. Raises ConnectionError if they cannot be renewed."""
        if self._looked_up is None:
            with self._lock:
                if self._looked_up is None:
                    self._look_up()
        if self._found is None:
            return None
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception as error:
            raise ConnectionError(f"the credentials could not be renewed: {error}") from error
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def renew(self) -> None:
        """Look them up again, unless that was done lately."""
        with self._lock:
            if self._looked_up is None or time.monotonic() - self._looked_up >= _LOOK_UP_AGAIN_S:
                self._look_up()

    def _look_up(self) -> None:
        try:
            import botocore.session
        except ImportError:
            pass
        else:
            self._found = botocore.session.get_session().get_credentials()
        self._looked_up = time.monotonic()
