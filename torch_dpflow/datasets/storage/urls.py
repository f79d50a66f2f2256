"""Joining and splitting fsspec's URLs, and removing passwords from them."""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple
from urllib.parse import unquote

from torch_dpflow.errors import OptionError

#: Schemes for which one file system serves all URLs, and in whose paths "::" has no special meaning.
ONE_FILE_SYSTEM = frozenset({"file", "local", "memory", "s3", "s3a", "oss", "http", "https"})
#: fsspec's names for the user and the password that may precede the host, by scheme.
_LOGINS = {
    **dict.fromkeys(("sftp", "ssh", "ftp", "smb", "http", "https"), ("username", "password")),
    **dict.fromkeys(("hdfs", "arrow_hdfs", "webhdfs"), ("user", "password")),
}
#: Schemes whose URLs may have an "@" without a user before it.
_NO_LOGINS = frozenset(
    {"file", "local", "memory", "abfs", "abfss", "az", "adl", "wasb", "wasbs", "github", "git", "hf"}
)
_LOGIN = re.compile(r"(?P<scheme>[A-Za-z0-9+.-]+)://(?P<login>[^/?#]*)@")
_CHAIN = re.compile(r"::(?=[a-z][a-z0-9+.-]*://|/)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
#: Schemes whose paths no library parses.
_LITERAL = frozenset({"file", "local", "memory", "s3", "s3a", "oss", "zip", "tar", "libarchive", "dir"})
_WITH_HOSTS = frozenset({*_LOGINS, "s3", "s3a", "oss"})
_CACHE = re.compile(r"[a-z0-9]+::")


#: Characters for bytes of a path that are not UTF-8: those that Python uses, and those that JSON allows.
_PRIVATE = {0xDC00 + byte: 0xF700 + byte for byte in range(0x80, 0x100)}


class ChainedUrl(NamedTuple):
    """The URL of an object that may be inside another, as in `zip://folder/a.jpg::s3://bucket/data.zip`."""

    #: `zip://folder/a.jpg`
    inner: str
    #: `::s3://bucket/data.zip`; "" if there is none
    outer: str


def check_url(url: str) -> None:
    """Raise OptionError for control characters in a URL, or whitespace in its host or bucket.

    URL parsers drop tabs and line breaks, or stop there, so that a different object would be read. Keys of S3 and OSS,
    names in archives and local paths are not parsed, and can contain control characters.
    """
    if url.isprintable() and " " not in url:
        return
    inner, outer = split_chain(url)
    if outer:
        check_url(outer.removeprefix("::"))
    scheme, separator, rest = inner.partition("://")
    host = rest.partition("/")[0] if scheme in _WITH_HOSTS else ""
    if separator and scheme not in _LITERAL and _CONTROL.search(inner):
        what = "a control character, such as a tab or a line break; remove it, or escape it (%09, %0A)"
    elif _CONTROL.search(host) or any(letter.isspace() for letter in host):
        what = "whitespace or a control character in its host or bucket; remove it"
    else:
        return
    raise OptionError(f"{printable_url(url)!r} has {what}")


def stored_url(url: str) -> str:
    """Return the form of a URL that is stored in metadata.

    The parameters of a signature are removed, because they differ each time that a URL is signed. Bytes of a local path
    that are not UTF-8 become private-use characters.
    """
    found = unsigned(url)
    return found if found.isascii() else found.translate(_PRIVATE)


def split_chain(url: str) -> ChainedUrl:
    """Split a URL, which may name an object inside another object. Raises OptionError for a URL of fsspec's caches."""
    if _CACHE.match(url):
        raise OptionError(
            f"{without_login(url)}: fsspec's caches are not supported; give the URL that follows the '::'"
        )
    link = None if url.partition("://")[0] in ONE_FILE_SYSTEM else _CHAIN.search(url)
    return ChainedUrl(url, "") if link is None else ChainedUrl(url[: link.start()], url[link.start() :])


def file_system_of(url: str) -> str:
    """Return the identity of a URL's file system: the scheme; outside `ONE_FILE_SYSTEM` also host, bucket or archive.

    Raises OptionError for a URL of fsspec's caches.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "file"
    if scheme in ONE_FILE_SYSTEM:
        return scheme
    outer = split_chain(url).outer
    return f"{scheme}://{outer}" if outer else f"{scheme}://{rest.partition('/')[0]}"


def join_url(base: str, path: str) -> str:
    """Return the URL of `path` below `base`, inside the same archive if `base` is in one."""
    if "::" not in base:
        return f"{base}/{path}" if base[-1:] not in ("", "/") and path[:1] != "/" else posixpath.join(base, path)
    inner, outer = split_chain(base)
    return posixpath.join(inner, path) + outer


def split_name(url: str) -> tuple[str, str]:
    """Return the directory and the last part of a URL or path; "." stands for a directory that is not named."""
    inner, outer = split_chain(url)
    folder, _, name = inner.rstrip("/").rpartition("/")
    if outer and folder.endswith(":/"):
        folder += "/"
    return (folder or ".") + outer, name


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without user and password, and fsspec's options with the user and password.

    Raises OptionError if the storage has no such options.
    """
    found: dict[str, str] = {}
    for match in _LOGIN.finditer(url):
        scheme, login = match["scheme"], match["login"]
        user, colon, password = login.partition(":")
        if scheme in _LOGINS:
            names = _LOGINS[scheme]
            values = (user, password) if colon else (user,)
            found |= {name: unquote(value) for name, value in zip(names, values)}
        elif colon and scheme not in _NO_LOGINS:
            raise OptionError(
                f"{without_login(url)} was given with a user and a password, which {scheme}:// does not support; "
                "give storage options, such as key and secret"
            )
    return without_login(url), found


#: Parameters of signed links, by kind: the ones that each link of the kind has, and others of its signature.
#: A short name such as "sr" belongs to a signature only next to the first ones. Elsewhere it names another object.
_SIGNED = (
    ({"x-amz-signature"}, "x-amz-*"),
    ({"x-goog-signature"}, "x-goog-*"),
    (
        {"x-oss-signature"},
        "x-oss-signature-version x-oss-credential x-oss-date x-oss-expires x-oss-additional-headers "
        "x-oss-security-token",
    ),
    (
        {"sig", "sv"},  # Azure
        "ss srt sp se st spr sr si sip sdd skoid sktid skt ske sks skv saoid suoid scid ses",
    ),
    ({"signature", "key-pair-id"}, "policy expires"),  # CloudFront
    ({"signature", "awsaccesskeyid"}, "expires x-amz-*"),
    ({"signature", "googleaccessid"}, "expires x-goog-*"),
    ({"signature", "ossaccesskeyid"}, "expires security-token"),
)


def unsigned(url: str) -> str:
    """Return a web server's URL without the signature in its query, which differs each time that the URL is signed.

    The signatures are those of S3, Google Cloud Storage, Azure, OSS and CloudFront. Other URLs are returned as given.
    """
    path, mark, query = url.partition("?")
    if not mark or not path.startswith(("http://", "https://")):
        return url
    fields = query.split("&")
    names = [field.partition("=")[0].lower() for field in fields]
    dropped: set[str] = set()
    prefixes: tuple[str, ...] = ()
    for required, others in _SIGNED:
        if required.issubset(names):
            dropped |= required | set(others.split())
            prefixes += tuple(other[:-1] for other in others.split() if other.endswith("*"))
    if not dropped:
        return url
    kept = [
        field
        for field, name in zip(fields, names, strict=True)
        if name not in dropped and not (prefixes and name.startswith(prefixes))
    ]
    return f"{path}?{'&'.join(kept)}" if kept else path


#: Values that must not be printed, whatever server they are for.
_SECRETS = re.compile(r"(?i)([?&](?:sig|signature|x-(?:amz|goog|oss)-signature|[a-z-]*token|[a-z-]*key)=)[^&#]+")


def printable_url(url: str) -> str:
    """Return a URL for logs and errors: without user, password, signature, tokens and keys."""
    found = unsigned(without_login(url))
    return _SECRETS.sub(r"\1...", found) if found.startswith(("http://", "https://")) else found


def without_login(url: str) -> str:
    """Return the URL without user and password, for files, logs and errors."""
    return _LOGIN.sub(_stripped, url) if "@" in url else url


def _stripped(match: re.Match[str]) -> str:
    scheme, login = match["scheme"], match["login"]
    is_login = scheme in _LOGINS or (":" in login and scheme not in _NO_LOGINS)
    return f"{scheme}://" if is_login else match[0]
