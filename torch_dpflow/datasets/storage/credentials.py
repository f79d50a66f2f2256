"""Who asks: access keys from options, the environment or the vendors' own files, in this order."""

from __future__ import annotations

import configparser
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_dpflow.errors import AccessDeniedError

#: Seconds between two look-ups: an object that we may not read must not cost one each time it is asked for.
_LOOK_UP_AGAIN_S = 60.0


@dataclass(frozen=True)
class Credentials:
    """An access key, and the security token that belongs to it if it is temporary."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class CredentialSource:
    """Credentials that are looked up once, and again when the storage turns them down. Thread-safe."""

    def __init__(self, find: Callable[[], Credentials | None]) -> None:
        self._find = find
        self._found = find()
        self._looked_up = time.monotonic()

    def get(self) -> Credentials | None:
        """Those found last."""
        return self._found

    def renew(self) -> bool:
        """Look them up again, unless that was done lately; whether there are other ones now."""
        if time.monotonic() - self._looked_up < _LOOK_UP_AGAIN_S:
            return False
        self._looked_up = time.monotonic()
        before, self._found = self._found, self._find()
        return self._found != before


def find_s3_credentials(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """What `options` (`key`, `secret`, `token`), AWS_* variables, the shared files or botocore's chain give.

    botocore, if it is installed, is asked last: it knows instance roles, SSO and web identities.
    """
    return (
        _from(options, "key", "secret", "token")
        or _from(environ, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        or _from_aws_files(environ)
        or _from_botocore(environ)
    )


def find_oss_credentials(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """What `options` (as for S3), OSS_* variables, ALIBABA_CLOUD_* variables or ossutil's file give."""
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
    """The error for a private object without any credentials; `how` names where they may be put."""
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
    """What ossutil's configuration file says, by lower-case name; empty without one."""
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
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return configparser.RawConfigParser()  # another tool's file, which its own errors are about
    return parser


def _from_botocore(environ: Mapping[str, str]) -> Credentials | None:
    if environ is not os.environ:
        return None  # botocore looks at the process's own
    try:
        import botocore.session
    except ImportError:
        return None
    found = botocore.session.get_session().get_credentials()
    if found is None:
        return None
    frozen = found.get_frozen_credentials()
    return Credentials(frozen.access_key, frozen.secret_key, frozen.token)
