"""Access keys: where they are found, when they are renewed, and when they are kept out of pickles.

OSS keys are found here and not by oss2. Besides options, oss2 reads only environment variables, and importing it costs
each worker process 0.25 s and 21 MB.
"""

from __future__ import annotations

import configparser
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import MissingExtraError, UsageError

#: Minimum seconds between two look-ups by botocore. A look-up may wait for servers that do not exist, and not every
#: read of a forbidden object may cause one.
_LOOK_UP_AGAIN_S = 60.0


@dataclass(frozen=True)
class Credentials:
    """An access key, with its security token if the key is temporary."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class CredentialSource:
    """Source of credentials, which are looked up again when the storage refuses them. Thread-safe.

    Args:
        find: returns credentials, or None if there are none. It must not wait. Called again when a key is refused.
        has_chain: whether botocore, if installed, looks for credentials when `find` returns None: roles of instances
            and containers, SSO, web identities. botocore renews these credentials before they expire.
    """

    def __init__(self, find: Callable[[], Credentials | None], *, has_chain: bool = False) -> None:
        self._find = find
        self._has_chain = has_chain
        self._lock = threading.Lock()
        self._found = find()
        #: Credentials of botocore, and when they were looked up.
        self._of_chain: Any = None
        self._looked_up = -math.inf

    def get(self) -> Credentials | None:
        """Return credentials; None if there are none. Raises ConnectionError if botocore cannot renew credentials."""
        if self._found is not None or not self._has_chain:
            return self._found
        if self._looked_up == -math.inf:
            with self._lock:
                self._look_up()
        return self._from_chain()

    def renew(self, used: Credentials | None) -> Credentials | None:
        """Return credentials that differ from `used`, which the storage refused; None if no others are found."""
        with self._lock:
            if (self._found or self._from_chain()) == used:
                self._found = self._find()
                if self._found is None and self._has_chain:
                    self._look_up()
            found = self._found or self._from_chain()
        return None if found == used else found

    def _from_chain(self) -> Credentials | None:
        if self._of_chain is None:
            return None
        try:
            frozen = self._of_chain.get_frozen_credentials()
        except Exception as error:
            raise ConnectionError(f"the credentials could not be renewed: {error}") from error
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def _look_up(self) -> None:
        """Look credentials up by botocore, unless the last look-up was within `_LOOK_UP_AGAIN_S`."""
        if time.monotonic() - self._looked_up < _LOOK_UP_AGAIN_S:
            return
        try:
            import botocore.session
        except ImportError:
            pass
        else:
            self._of_chain = botocore.session.get_session().get_credentials()
        self._looked_up = time.monotonic()


def find_s3_credentials(options: Mapping[str, Any]) -> Credentials | None:
    """Return the first credentials in `options` (`key`, `secret`, `token`), AWS_* variables, AWS's files; else None."""
    return (
        _from(options, "key", "secret", "token")
        or _from(os.environ, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        or _from(aws_profile(), "aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    )


def find_oss_credentials(options: Mapping[str, Any]) -> Credentials | None:
    """Return the first credentials in `options`, OSS_* or ALIBABA_CLOUD_* variables or ossutil's file; else None."""
    alibaba = [f"ALIBABA_CLOUD_{name}" for name in ("ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "SECURITY_TOKEN")]
    return (
        _from(options, "key", "secret", "token")
        or _from(os.environ, "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN")
        or _from(os.environ, *alibaba)
        or _from(ossutil_settings(), "accesskeyid", "accesskeysecret", "ststoken")
    )


def _from(source: Mapping[str, Any], key_id: str, secret: str, token: str) -> Credentials | None:
    if source.get(key_id) and source.get(secret):
        return Credentials(str(source[key_id]), str(source[secret]), source.get(token) or None)
    return None


def aws_profile() -> Mapping[str, Any]:
    """Return the settings of the profile AWS_PROFILE, or "default", in AWS's shared files; empty if there are none.

    Nested settings, such as those below `s3 =`, are mappings. Raises MissingExtraError if there are files but no
    botocore to read them.
    """
    profile = os.environ.get("AWS_PROFILE", "default")
    config = _aws_file("AWS_CONFIG_FILE", "config")
    keys = _aws_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    return {**(config.get(f"profile {profile}") or config.get(profile) or {}), **keys.get(profile, {})}


def aws_services(name: str) -> Mapping[str, Any]:
    """Return the settings of the section `services <name>` of AWS's shared configuration; empty if it is missing."""
    return _aws_file("AWS_CONFIG_FILE", "config").get(f"services {name}") or {}


def _aws_file(variable: str, name: str) -> dict[str, dict[str, Any]]:
    path = os.path.expanduser(os.environ.get(variable) or f"~/.aws/{name}")
    if not os.path.isfile(path):
        return {}
    try:
        from botocore.configloader import raw_config_parse
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs botocore to be read: {error}; pip install 'torch_dpflow[s3]', or remove the file"
        ) from error
    try:
        found: dict[str, dict[str, Any]] = raw_config_parse(path)
    except BotoCoreError:
        return {}  # a file of another tool, which reports its errors itself
    return found


def ossutil_settings() -> Mapping[str, str]:
    """Return the settings in `[Credentials]` of ossutil's file, by lower-case name; empty if it cannot be read."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(os.path.expanduser("~/.ossutilconfig"), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}  # a file of another tool, which reports its errors itself
    return dict(parser["Credentials"]) if parser.has_section("Credentials") else {}


#: Parts of the names of options that are secrets, for all file systems of fsspec.
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
#: Ends of names of secrets; as parts they would match others, such as `key_filename`.
_SECRET_ENDS = ("customerkey", "apikey", "accesskey", "privatekey", "sharedkey", "key_content")
#: Values of gcsfs's `token` that name a source.
_SOURCES = frozenset({"anon", "google_default", "cloud", "cache", "browser"})
#: The name that accompanies a secret and has no use without it.
_ACCOMPANIES = "key"

_key_policy: ContextVar[Literal["keep", "refuse", "leave out"]] = ContextVar("key_policy", default="keep")
#: Names of options that were left out of what this process has unpickled.
_left_out: set[str] = set()


@contextmanager
def refuse_keys() -> Iterator[None]:
    """In the body of `with`, pickling storage options with keys raises UsageError: others may read the pickle."""
    before = _key_policy.set("refuse")
    try:
        yield
    finally:
        _key_policy.reset(before)


@contextmanager
def leave_out_keys() -> Iterator[None]:
    """In the body of `with`, leave storage keys out of pickles. The process that unpickles them needs separate keys."""
    before = _key_policy.set("leave out")
    try:
        yield
    finally:
        _key_policy.reset(before)


def options_to_pickle(options: Mapping[str, Any]) -> Any:
    """Return an object to pickle in place of storage options. It unpickles to a mapping of these options.

    Inside `leave_out_keys` the mapping lacks all secrets. Inside `refuse_keys`, raises UsageError if there are secrets.
    """
    policy = _key_policy.get()
    if policy == "keep":
        return options
    names: set[str] = set()
    rest = _without_keys(options, names)
    if policy == "leave out":
        return _Rest(rest, sorted(names)) if names else rest
    names.discard(_ACCOMPANIES)
    if names:
        raise UsageError(
            f"storage_options {sorted(names)} would be written to the file; leave them out, and give keys to the "
            "processes that read it by their environment (AWS_ACCESS_KEY_ID, OSS_ACCESS_KEY_ID and so on) or by the "
            "vendor's own files"
        )
    return options


def left_out_hint() -> str:
    """Return advice to append to errors about credentials if this process unpickled options without keys, else ""."""
    if not _left_out:
        return ""
    return (
        f"; storage_options {sorted(_left_out)} of the training process were not sent to this worker, as keys never "
        "are: give it separate keys, by a role of its machine or function, the environment (AWS_ACCESS_KEY_ID, "
        "OSS_ACCESS_KEY_ID and so on) or the vendor's files"
    )


@dataclass(frozen=True)
class _Rest:
    """Storage options without keys. Unpickling returns the options, and records the names of the missing keys."""

    options: Any
    names: Sequence[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remember, (self.options, self.names)


def _remember(options: Any, names: Sequence[str]) -> Any:
    _left_out.update(names)
    return options


def _without_keys(value: Any, names: set[str]) -> Any:
    """Return a copy without secrets, and add their names to `names`."""
    if isinstance(value, Mapping):
        pairs = [pair for pair in value.items() if not _is_secret(pair, names)]
        return {name: _without_keys(inner, names) for name, inner in pairs}
    if isinstance(value, tuple | list):
        kept = [inner for inner in value if not _is_secret(inner, names)]
        return type(value)(_without_keys(inner, names) for inner in kept)
    if isinstance(value, str) and without_login(value) != value:
        names.add("user and password of a URL")
        return without_login(value)
    return value


def _is_secret(pair: Any, names: set[str]) -> bool:
    """Return whether `pair` is a secret's name and the secret, as in a list of headers; adds the name to `names`."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    name, value = pair
    low = name.lower().replace("-", "_")
    if not value or isinstance(value, bool) or (isinstance(value, str) and value in _SOURCES):
        return False
    if not (low == _ACCOMPANIES or any(part in low for part in _SECRET) or low.endswith(_SECRET_ENDS)):
        return False
    names.add(name)
    return True
