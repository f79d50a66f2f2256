"""URLs as fsspec has them: joined, taken apart, and without the passwords in them. Pure."""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple
from urllib.parse import unquote

from torch_dpflow.errors import OptionError

#: Storages of which one file system serves all URLs, and in whose names "::" stands for nothing else.
ONE_FILE_SYSTEM = frozenset({"file", "local", "memory", "s3", "s3a", "oss", "http", "https"})
#: Where a user, and a password behind a colon, may stand before the host, and what fsspec calls them.
_LOGINS = {
    **dict.fromkeys(("sftp", "ssh", "ftp", "smb", "http", "https"), ("username", "password")),
    **dict.fromkeys(("hdfs", "arrow_hdfs", "webhdfs"), ("user", "password")),
}
#: Where what stands before the "@" is none.
_NO_LOGINS = frozenset(
    {"file", "local", "memory", "abfs", "abfss", "az", "adl", "wasb", "wasbs", "github", "git", "hf"}
)
_LOGIN = re.compile(r"(?P<scheme>[A-Za-z0-9+.-]+)://(?P<login>[^/?#]*)@")
_CHAIN = re.compile(r"::(?=[a-z][a-z0-9+.-]*://|/)")
_CACHE = re.compile(r"[a-z0-9]+::")


class ChainedUrl(NamedTuple):
    """A URL whose object lies inside another: `zip://folder/a.jpg::s3://bucket/data.zip`."""

    #: with its scheme: `zip://folder/a.jpg`
    inner: str
    #: where that lies, with the colons: `::s3://bucket/data.zip`; "" where it is not inside another
    outer: str


def split_chain(url: str) -> ChainedUrl:
    """Take apart where an object lies inside another. Raises OptionError for fsspec's caches."""
    if _CACHE.match(url):
        raise OptionError(
            f"{without_login(url)}: fsspec's caches are not read through; give what stands behind the '::'"
        )
    link = None if url.partition("://")[0] in ONE_FILE_SYSTEM else _CHAIN.search(url)
    return ChainedUrl(url, "") if link is None else ChainedUrl(url[: link.start()], url[link.start() :])


def file_system_of(url: str) -> str:
    """What names the file system of a URL: its scheme, with the host or bucket where that counts.

    Raises OptionError for fsspec's caches.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "file"
    if scheme in ONE_FILE_SYSTEM:
        return scheme
    outer = split_chain(url).outer
    return f"{scheme}://{outer}" if outer else f"{scheme}://{rest.partition('/')[0]}"


def join_url(base: str, path: str) -> str:
    """The URL of `path` below `base`, inside the same archive where `base` is in one."""
    if "::" not in base:
        return (
            f"{base}/{path}" if base[-1:] not in ("", "/") and path[:1] != "/" else posixpath.join(base, path)
        )
    inner, outer = split_chain(base)
    return posixpath.join(inner, path) + outer


def split_name(url: str) -> tuple[str, str]:
    """The directory and the last part of a URL or path; "." where there is no directory."""
    inner, outer = split_chain(url)
    folder, _, name = inner.rstrip("/").rpartition("/")
    if outer and folder.endswith(":/"):
        folder += "/"
    return (folder or ".") + outer, name


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """A URL without user and password, and the options that stand for them.

    Raises:
        OptionError: its storage knows none.
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
                f"{without_login(url)} was given with a user and a password, which {scheme}:// does not know; "
                "give storage options, such as key and secret"
            )
    return without_login(url), found


def without_login(url: str) -> str:
    """The URL as it may be written and printed."""
    return _LOGIN.sub(_stripped, url) if "@" in url else url


def _stripped(match: re.Match[str]) -> str:
    scheme, login = match["scheme"], match["login"]
    is_login = scheme in _LOGINS or (":" in login and scheme not in _NO_LOGINS)
    return f"{scheme}://" if is_login else match[0]
