"""fsspec's file systems: reading through them within deadlines, opening them by URL, their options, and archives."""

from __future__ import annotations

import asyncio
import inspect
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.storage.archives import check_member, prepare_archive, state_of_archive
from torch_dpflow.datasets.storage.base import (
    MAX_WAIT_S,
    WRITTEN_AGAIN,
    ByteRange,
    ObjectState,
    ReadOptions,
    is_state_of_entry,
    state_of_entry,
)
from torch_dpflow.datasets.storage.credentials import find_oss_credentials, left_out_hint
from torch_dpflow.datasets.storage.failures import storage_error
from torch_dpflow.datasets.storage.urls import ONE_FILE_SYSTEM, check_url, split_chain, split_login
from torch_dpflow.datasets.storage.web_service import tls_context, web_headers
from torch_dpflow.errors import (
    ChecksumError,
    DPFlowError,
    MissingExtraError,
    ObjectMissingError,
    OptionError,
    StorageError,
    TruncatedObjectError,
)

_EXTRAS = {"s3": "s3", "s3a": "s3", "oss": "oss", "http": "http", "https": "http"}
#: Options that name a server, of all file systems.
_SERVERS = ("endpoint", "endpoint_url", "account_name", "account_host", "host", "port")
#: Schemes of file systems inside another storage.
_ARCHIVES = frozenset({"zip", "tar", "libarchive", "dir"})
#: scheme → (the vendor's name for the endpoint, the other one)
_ENDPOINTS = {
    "s3": ("endpoint_url", "endpoint"),
    "s3a": ("endpoint_url", "endpoint"),
    "oss": ("endpoint", "endpoint_url"),
}
#: Options of every file system of fsspec, and those that s3fs passes to its session.
_COMMON = {"skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths"}
_OF_SESSIONS = {"profile", "session_vars", "event_hooks", "include_builtin_handlers"}
#: Options of this package's readers, which ossfs ignores.
_OF_READERS = {"anon", "region", "verify"}
#: Extensions of compressed tar archives that fsspec does not infer, and fsspec's name of the compression.
_COMPRESSIONS = {
    **dict.fromkeys((".tgz", ".taz"), "gzip"),
    **dict.fromkeys((".tbz", ".tbz2", ".tb2"), "bz2"),
    **dict.fromkeys((".txz", ".tlz"), "xz"),
    ".tzst": "zstd",
}


class FsspecStorage:
    """Storage that is read through fsspec's file system of `address`, with `options`.

    If a `ByteRange` to be fetched has an expected `state`, `fetch` reads the bytes and then requests the object's size
    and state. If these differ from the expected ones, because the object was replaced, it raises an error.
    """

    is_remote = True

    def __init__(self, address: str, options: Mapping[str, Any], limits: ReadOptions) -> None:
        self._scheme = address.partition("://")[0]
        self._longest = limits.longest
        self._servers = servers_of(options)
        self._files = open_file_system(address, options, limits.deadline_s)[0]
        self._archive = state_of_archive(self._files)

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        if span.length is not None and span.length > self._longest:
            raise StorageError(f"{span}: {span.length} bytes are above the limit of {self._longest}")
        extent = {} if span.is_whole else {"start": span.start, "end": span.stop}
        data = bytes(self._call(span, deadline, "cat_file", **extent))
        if span.length is not None and len(data) < span.length:
            raise TruncatedObjectError(f"{span}: the object gave only {len(data)} bytes of {span.length}")
        if len(data) > self._longest:
            raise StorageError(f"{span}: {len(data)} bytes are above the limit of {self._longest}")
        if state_of_archive(self._files) != self._archive:
            raise ChecksumError(f"{span}: {WRITTEN_AGAIN}")
        if span.state is not None:
            self.look(span, deadline)
        elif span.is_whole:
            span.check_size(len(data))
        if span.length is None or len(data) == span.length:
            return data
        if self._scheme == "oss":  # ossfs includes the byte at `end`
            return data[: span.length]
        raise StorageError(f"{span}: the file system gave {len(data)} bytes where {span.length} were requested")

    def look(self, span: ByteRange, deadline: float) -> ObjectState:
        self._files.invalidate_cache()  # of listings
        entry = self._call(span, deadline, "info")
        if entry["type"] == "directory":
            raise ObjectMissingError(f"{span}: this is a directory, not a file")
        span.check_size(entry.get("size"))
        if span.state is not None and not is_state_of_entry(span.state, entry):
            raise span.replaced(state_of_entry(entry))
        return ObjectState(entry.get("size"), state_of_entry(entry))

    def _call(self, span: ByteRange, deadline: float, name: str, **how: Any) -> Any:
        """Call a method of the file system with the path of `span`. Raises StorageError."""
        try:
            path = path_of(self._files, span.url)
            check_member(self._files, path, span.url)
            left = deadline - time.monotonic()
            if isinstance(self._files, AsyncFileSystem) and not isinstance(self._files, DirFileSystem):
                calling = asyncio.wait_for(getattr(self._files, f"_{name}")(path, **how), max(left, 0.0))
                return asyncio.run_coroutine_threadsafe(calling, self._files.loop).result()
            return call_with_deadline(self._files, left, lambda: getattr(self._files, name)(path, **how))
        except Exception as error:
            raise storage_error(span, error) from error

    def node(self, url: str) -> str:
        inner, outer = split_chain(url)
        return " ".join([outer or "/".join(inner.split("/", 3)[:3]), *self._servers])

    def close(self) -> None:
        """Do nothing: connections belong to fsspec, which shares its file systems between callers."""


def open_file_system(address: str, options: Mapping[str, Any], seconds: float) -> tuple[Any, str]:
    """Return the file system that serves `address`, a URL or a result of `file_system_of`, and the path in it.

    Raises:
        OptionError: there is no such storage, or the storage has no such option.
        MissingExtraError: the storage's package is not installed.
        StorageError: the storage could not be reached within `seconds`, or an archive cannot be read.
    """
    url, login = split_login(address if "://" in address else f"{address}://")
    scheme = url.partition("://")[0]
    if scheme in _ARCHIVES and "::" in url and not split_chain(url).outer:
        raise OptionError(
            f"{url} names the archive or folder by a relative path; give an absolute path or a URL, as in "
            "zip://folder::/data/a.zip"
        )
    try:
        given = _options_of_chain(url, {**options, **login})
        kind = fsspec.get_filesystem_class(scheme)
        if needs_host(kind) and not (given.get("host") or kind._get_kwargs_from_urls(url).get("host")):
            raise OptionError(f"{url} names no host; give one, as in sftp://host/folder")
        if scheme in ONE_FILE_SYSTEM:
            file_system = fsspec.filesystem(scheme, **given)
            path = file_system._strip_protocol(url)  # url_to_fs would split a name with "::"
        else:  # it may connect at once
            file_system, path = call_within(seconds, lambda: _connected(url, given))
        return file_system, path
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        how = f"pip install 'torch_dpflow[{extra}]'" if extra else "install the package that it names"
        raise MissingExtraError(f"{scheme}:// needs a package that is not installed: {error}; {how}") from error
    except DPFlowError:
        raise
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"{url} cannot be opened: {error}; give a local path "
            f"or a URL that fsspec can open, and the options that it needs{left_out_hint()}"
        ) from error
    except Exception as error:
        raise storage_error(ByteRange(url), error) from error


def _connected(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    file_system, path = fsspec.url_to_fs(url, **options)
    prepare_archive(file_system, url)
    return file_system, path


def path_of(file_system: Any, url: str) -> str:
    """Return the path by which `file_system` finds the object at `url`. Characters such as "?" are taken literally."""
    check_url(url)
    inner, _ = split_chain(url) if "::" in url else (url, "")
    scheme, _, rest = inner.partition("://")
    if scheme not in ONE_FILE_SYSTEM and "host" in type(file_system)._get_kwargs_from_urls(f"{scheme}://host/"):
        return "/" + rest.partition("/")[2]  # fsspec would cut off a "?" as a query
    return str(file_system._strip_protocol(inner))


def needs_host(kind: type) -> bool:
    """Return whether a file system class connects to a host with disks, where a file's directory must be made first."""
    parameter = inspect.signature(kind.__init__).parameters.get("host")  # type: ignore[misc]
    return parameter is not None and parameter.default is parameter.empty


def _options_of_chain(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return fsspec's options for a URL. In a chain, options belong to the last storage unless given under a scheme."""
    links: list[str] = []
    rest = url
    while rest:
        inner, outer = split_chain(rest)
        links.append(inner)
        rest = outer.removeprefix("::")
    schemes = [link.partition("://")[0] if "://" in link else "file" for link in links]
    if len(schemes) == 1:
        return fsspec_options(schemes[0], options)
    own = {name: value for name, value in options.items() if name in schemes}
    if schemes[0] == "tar":
        compression = _COMPRESSIONS.get(posixpath.splitext(links[1])[1].lower())
        own["tar"] = {**({"compression": compression} if compression else {}), **own.get("tar", {})}
    last = {name: value for name, value in options.items() if name not in schemes}
    return {**own, schemes[-1]: {**fsspec_options(schemes[-1], last), **own.get(schemes[-1], {})}}


def servers_of(options: Mapping[str, Any]) -> list[str]:
    """Return the servers that options name, such as endpoints. Different servers can have objects with the same URL."""
    nested = [value for value in options.values() if isinstance(value, Mapping)]
    return [str(of[name]) for of in (options, *nested) for name in _SERVERS if of.get(name)]


def endpoint_of(scheme: str, options: Mapping[str, Any]) -> Any:
    """Return the option `endpoint` or `endpoint_url`, or None. Raises OptionError if both are given and differ."""
    given = {options[name] for name in _ENDPOINTS[scheme] if options.get(name)}
    if len(given) > 1:
        raise OptionError(
            f"{scheme}:// has endpoint={options['endpoint']!r} and endpoint_url={options['endpoint_url']!r}; "
            "the two mean the same: give one of them"
        )
    return next(iter(given), None)


def fsspec_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options, whose names are the same for every vendor, to options of fsspec's package for `scheme`.

    Raises:
        OptionError, OptionTypeError: the storage has no such option, or does not allow its value.
        ImportError: the package is not installed.
    """
    if scheme in ("http", "https"):
        return _web_options(options)
    if scheme not in _ENDPOINTS:
        return dict(options)
    name, other = _ENDPOINTS[scheme]
    endpoint = endpoint_of(scheme, options)
    # In their order, because fsspec's cache of file systems depends on it.
    found = {name if option == other else option: value for option, value in options.items()}
    if name in found:
        found[name] = endpoint
    if scheme == "oss":
        if options.get("cname"):
            raise OptionError(
                "oss:// with cname=True only reads objects by their names; to list or write, give the endpoint of the "
                "bucket's region without cname, as in https://oss-cn-hangzhou.aliyuncs.com"
            )
        found.pop("cname", None)
        found = {**_oss_keys(options), **found}
    else:
        _move(found, "region", "client_kwargs", "region_name")
        _move(found, "verify", "client_kwargs", "verify")
        if "addressing_style" in found:
            found["s3"] = {"addressing_style": found.pop("addressing_style")}
            _move(found, "s3", "config_kwargs", "s3")
    _check_names(scheme, found)
    return found


def _web_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that fsspec passes to aiohttp with every request."""
    headers = web_headers(options)
    context = {} if options.get("verify") is None else {"ssl": tls_context(options)}
    return {**({"headers": headers} if headers else {}), **context}


def _oss_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's access key as options if `options` contain none: ossfs, unlike s3fs, does not look for keys."""
    if options.get("anon") or options.get("key"):
        return {}
    keys = find_oss_credentials(options)
    if keys is None:
        return {}
    token = {} if keys.token is None else {"token": keys.token}
    return {"key": keys.key_id, "secret": keys.secret, **token}


def _move(options: dict[str, Any], name: str, group: str, inner: str) -> None:
    """Move an option, if it is given, into `group`, the options of another constructor."""
    if name in options:
        value = options.pop(name)
        options[group] = {inner: value, **(options.get(group) or {})}


def _check_names(scheme: str, options: Mapping[str, Any]) -> None:
    own = _parameters(fsspec.get_filesystem_class(scheme))
    allowed = own | _COMMON | (_OF_READERS if scheme == "oss" else _OF_SESSIONS)
    unknown = sorted(options.keys() - allowed)
    if unknown:
        usual = "key, secret, token, endpoint, region or anon"
        raise OptionError(f"{scheme}:// has no option {unknown}; give {usual}, or one of its package: {sorted(own)}")


def _parameters(file_system: type) -> set[str]:
    """Return the names of the constructor parameters of a file system class and its base classes."""
    found = [
        parameter
        for above in file_system.__mro__
        if "__init__" in vars(above)
        for parameter in list(inspect.signature(above.__init__).parameters.values())[1:]  # type: ignore[misc]
    ]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in found if parameter.kind in named}


T = TypeVar("T")

#: Modules whose file systems are thread-safe. Calls of others are serialized: `tar` and `zip` would return each other's
#: bytes (they share one position in one file), `sftp` hangs, `memory` fails to list what another thread removes and
#: creates a file twice.
_THREAD_SAFE = ("fsspec.implementations.local", "fsspec.implementations.arrow", "ossfs")
#: All file systems in memory share one table of files.
_MEMORY_LOCK = PerProcess(threading.Lock)
#: The attribute of a file system with its lock. A forked process opens its own file systems.
_LOCK = "_dpflow_lock"


def is_thread_safe(file_system: Any) -> bool:
    """Return whether several threads can call a file system of fsspec at once. All asynchronous ones allow this."""
    if isinstance(file_system, DirFileSystem):
        return is_thread_safe(file_system.fs)
    module = type(file_system).__module__
    return isinstance(file_system, AsyncFileSystem) or any(
        module == known or module.startswith(f"{known}.") for known in _THREAD_SAFE
    )


def _locks(file_system: Any) -> list[threading.Lock]:
    """Return the locks of this file system and the ones that it wraps, inner ones first; thread-safe ones have none.

    All callers take the locks in this order. A call that hangs keeps only the locks of the file systems it uses.
    """
    found = []
    while file_system is not None:
        if isinstance(file_system, MemoryFileSystem):
            found.append(_MEMORY_LOCK.get())
        elif not isinstance(file_system, DirFileSystem) and not is_thread_safe(file_system):
            found.append(vars(file_system).setdefault(_LOCK, threading.Lock()))  # atomic
        outer = getattr(file_system, "of", None) or getattr(file_system, "fo", None)  # of archives
        file_system = getattr(file_system if outer is None else outer, "fs", None)
    return found


def exclusive(file_system: Any) -> AbstractContextManager[Any]:
    """Return a context manager that admits one thread at a time to a file system that is not thread-safe.

    Do not use `call_with_deadline` inside, which takes the same locks.
    """
    return _held(_locks(file_system), MAX_WAIT_S)


@contextmanager
def _held(locks: Sequence[threading.Lock], seconds: float) -> Iterator[None]:
    """Hold all locks. Raises TimeoutError if one cannot be taken within `seconds`."""
    end = time.monotonic() + seconds
    with ExitStack() as held:
        for lock in locks:
            if not lock.acquire(timeout=min(max(end - time.monotonic(), 0.0), MAX_WAIT_S)):
                raise TimeoutError(f"other reads took {seconds:.1f} s, and this file system serves one at a time")
            held.callback(lock.release)
        yield


def call_with_deadline(file_system: Any, seconds: float, call: Callable[[], T]) -> T:
    """Return the result of `call`, which uses `file_system`, within `seconds`.

    Calls are serialized if the file system is not thread-safe. Calls of a local file system have no time limit. For the
    file system in memory, only the wait for other calls is limited.

    Raises the errors of the call, and TimeoutError if the call has not ended in time.
    """
    if isinstance(file_system, LocalFileSystem):
        return call()
    locks = _locks(file_system)

    def serialized() -> T:
        with _held(locks, seconds):
            return call()

    return serialized() if isinstance(file_system, MemoryFileSystem) else call_within(seconds, serialized)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of `call`, run in a separate thread, within `seconds`. A call that hangs keeps its thread.

    Raises the errors of the call, and TimeoutError if the call has not ended in time.
    """
    results: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    worker = threading.Thread(target=run, name="dpflow-storage-call", daemon=True)
    worker.start()
    worker.join(min(max(seconds, 0.0), MAX_WAIT_S))
    if results.empty():
        raise TimeoutError(f"no response within {seconds:.1f} s")
    value, error = results.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
