"""Turns options, which have the same names for every vendor, into those of fsspec's packages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import fsspec

from torch_dpflow.datasets.storage.credentials import find_oss_credentials
from torch_dpflow.datasets.storage.tls import tls_context
from torch_dpflow.datasets.storage.web_headers import web_headers
from torch_dpflow.errors import OptionError

#: scheme → (a vendor's name for the endpoint, another's)
_ENDPOINTS = {
    "s3": ("endpoint_url", "endpoint"),
    "s3a": ("endpoint_url", "endpoint"),
    "oss": ("endpoint", "endpoint_url"),
}
#: Options of every file system of fsspec's, and those that s3fs passes to its session.
_COMMON = {"skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths"}
_OF_SESSIONS = {"profile", "session_vars", "event_hooks", "include_builtin_handlers"}
#: Options of our own readers, which ossfs ignores.
_OF_READERS = {"anon", "region", "verify"}


def endpoint_of(scheme: str, options: Mapping[str, Any]) -> Any:
    """The option `endpoint` or `endpoint_url`; None: none.

    Raises:
        OptionError: both are given, with different values.
    """
    given = {options[name] for name in _ENDPOINTS[scheme] if options.get(name)}
    if len(given) > 1:
        raise OptionError(
            f"{scheme}:// has endpoint={options['endpoint']!r} and endpoint_url={options['endpoint_url']!r}; "
            "the two mean the same: give one of them"
        )
    return next(iter(given), None)


def fsspec_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of fsspec's package for `scheme`; those of other schemes are returned unchanged.

    Raises:
        OptionError: S3 or OSS has no such option.
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
    """The options that fsspec passes to aiohttp with every request."""
    headers = web_headers(options)
    context = {} if options.get("verify") is None else {"ssl": tls_context(options, os.environ)}
    return {**({"headers": headers} if headers else {}), **context}


def _oss_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The access key if `options` have none: ossfs, unlike s3fs, looks for none."""
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
        raise OptionError(
            f"{scheme}:// has no option {unknown}; give {usual}, or what its package takes: {sorted(own)}"
        )


def _parameters(file_system: type) -> set[str]:
    """The parameter names of a class of file systems and its base classes."""
    found = [
        parameter
        for above in file_system.__mro__
        if "__init__" in vars(above)
        for parameter in list(inspect.signature(above.__init__).parameters.values())[1:]  # type: ignore[misc]
    ]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in found if parameter.kind in named}
