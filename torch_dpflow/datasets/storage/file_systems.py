"""Opens fsspec's file systems by their URLs, also those that need a host and those inside archives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from email.utils import formatdate
from typing import Any

import fsspec

from torch_dpflow.datasets.storage.archives import tar_options, use_plain_names
from torch_dpflow.datasets.storage.base import REVISION_PATTERN, ByteRange
from torch_dpflow.datasets.storage.credentials import about_left_out
from torch_dpflow.datasets.storage.deadlines import call_within
from torch_dpflow.datasets.storage.failures import storage_error
from torch_dpflow.datasets.storage.fsspec_options import fsspec_options
from torch_dpflow.datasets.storage.urls import ONE_FILE_SYSTEM, check_url, split_chain, split_login
from torch_dpflow.errors import DPFlowError, MissingExtraError, OptionError

_EXTRAS = {"s3": "s3", "s3a": "s3", "oss": "oss", "http": "http", "https": "http"}

#: Schemes of file systems inside another storage.
_ARCHIVES = frozenset({"zip", "tar", "libarchive", "dir"})


def open_file_system(address: str, options: Mapping[str, Any], seconds: float) -> tuple[Any, str]:
    """The file system that serves `address`, a URL or a result of `file_system_of`, and the path there.

    Raises:
        OptionError: there is no such storage, or it has no such option.
        MissingExtraError: its package is not installed.
        StorageError: it could not be reached within `seconds`.
    """
    url, login = split_login(address if "://" in address else f"{address}://")
    scheme = url.partition("://")[0]
    if scheme in _ARCHIVES and "::" in url and not split_chain(url).outer:
        raise OptionError(
            f"{url} names what it lies in by a relative path; give a whole one or a URL, as in zip://folder::/data/a.zip"
        )
    try:
        given = _options_of(url, {**options, **login})
        _check_host(url, given)
        if scheme in ONE_FILE_SYSTEM:
            file_system = fsspec.filesystem(scheme, **given)
            path = file_system._strip_protocol(url)  # url_to_fs would split a name with "::"
        else:  # it may connect at once
            file_system, path = call_within(seconds, lambda: _connected(url, given))
        return file_system, path
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        how = f"pip install 'torch_dpflow[{extra}]'" if extra else "install the package that it names"
        raise MissingExtraError(f"{scheme}:// needs a package that is not there: {error}; {how}") from error
    except DPFlowError:
        raise
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"{url} cannot be opened: {error}; give a local path "
            f"or a URL that fsspec can open, and the options that it needs{about_left_out()}"
        ) from error
    except Exception as error:
        raise storage_error(ByteRange(url), error) from error


def _connected(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    file_system, path = fsspec.url_to_fs(url, **options)
    use_plain_names(file_system, url)
    return file_system, path


def path_of(file_system: Any, url: str) -> str:
    """A file system's path of the object at `url`, which is taken literally."""
    check_url(url)
    inner, _ = split_chain(url) if "::" in url else (url, "")
    scheme, _, rest = inner.partition("://")
    if scheme not in ONE_FILE_SYSTEM and "host" in type(file_system)._get_kwargs_from_urls(
        f"{scheme}://host/"
    ):
        return "/" + rest.partition("/")[2]  # fsspec would cut off a "?" as a query
    return str(file_system._strip_protocol(inner))


def revision_of(entry: Mapping[str, Any]) -> str | None:
    """The state of an object in an entry of a listing of S3 or OSS: its ETag, or the time of its last change.

    The former in quotes, the latter as an HTTP date. None: the entry has neither, or a weak ETag.
    """
    tag, changed = entry.get("ETag"), entry.get("LastModified")
    if isinstance(tag, str):
        quoted = '"' + tag.strip('"') + '"'  # some servers leave the quotes out
        return quoted if re.fullmatch(REVISION_PATTERN, quoted) else None
    if isinstance(changed, int | float):  # ossfs
        return formatdate(changed, usegmt=True)
    return None


def needs_host(kind: type) -> bool:
    """Whether a class of file systems is for hosts with disks, where a file needs its directory first."""
    parameter = inspect.signature(kind.__init__).parameters.get("host")  # type: ignore[misc]
    return parameter is not None and parameter.default is parameter.empty


def _options_of(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """fsspec's options; in a chain they are for its last storage, except those under a scheme."""
    schemes = [link.partition("://")[0] if "://" in link else "file" for link in _links(url)]
    if len(schemes) == 1:
        return fsspec_options(schemes[0], options)
    own = {name: value for name, value in options.items() if name in schemes}
    if schemes[0] == "tar":
        own["tar"] = {**tar_options(_links(url)[1]), **own.get("tar", {})}
    rest = {name: value for name, value in options.items() if name not in schemes}
    return {**own, schemes[-1]: {**fsspec_options(schemes[-1], rest), **own.get(schemes[-1], {})}}


def _check_host(url: str, options: Mapping[str, Any]) -> None:
    kind = fsspec.get_filesystem_class(url.partition("://")[0])
    if needs_host(kind) and not (options.get("host") or kind._get_kwargs_from_urls(url).get("host")):
        raise OptionError(f"{url} names no host; give one, as in sftp://host/folder")


def _links(url: str) -> list[str]:
    links: list[str] = []
    while url:
        inner, outer = split_chain(url)
        links.append(inner)
        url = outer.removeprefix("::")
    return links
