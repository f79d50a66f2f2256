"""Access keys from options, the environment or the vendors' own files, in this order."""

from __future__ import annotations

import configparser
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch_dpflow.errors import AccessDeniedError, UsageError


@dataclass(frozen=True)
class Credentials:
    """An access key, and the security token that belongs to it if it is temporary."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


#: What names of options for secrets have in them, for all file systems that fsspec knows.
_SECRET = ("secret", "token", "pass", "_key", "pkey", "credential", "connection_string", "auth", "cookie")
_keeps_out: ContextVar[bool] = ContextVar("keeps_out", default=False)


@contextmanager
def kept_out() -> Iterator[None]:
    """Have objects that hold keys of a storage refuse to be pickled: others may read what is written meanwhile."""
    before = _keeps_out.set(True)
    try:
        yield
    finally:
        _keeps_out.reset(before)


def check_kept_out(options: Mapping[str, Any]) -> None:
    """Raise UsageError in `kept_out` if there are keys among these storage options."""
    if _keeps_out.get() and (names := sorted(_secrets(options))):
        raise UsageError(
            f"storage_options {names} would be written with it; leave them out, and give keys by the environment of "
            "whoever reads it (AWS_ACCESS_KEY_ID, OSS_ACCESS_KEY_ID and so on) or by the vendor's own files"
        )


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif value and any(part in str(name).lower() for part in _SECRET):
            yield str(name)


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
        "or with 'anon': True for a public bucket"
    )


def aws_setting(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """One setting of the chosen profile in AWS's shared configuration, such as `region`."""
    profile = environ.get("AWS_PROFILE", "default")
    for section in (f"profile {profile}", profile):
        for parser in _aws_files(environ):
            if parser.has_option(section, name):
                return parser.get(section, name)
    return None


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
