"""Headers of every request to a web server, from options."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError

_OPTIONS = frozenset({"headers", "username", "password", "verify"})


def web_headers(options: Mapping[str, Any]) -> dict[str, str]:
    """The headers from `options`. Raises OptionError, OptionTypeError."""
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise OptionError(
            f"http:// has no option {unknown}; give headers, username and password, or verify; where data "
            "lies on another storage than the store, give its options by themselves"
        )
    headers = options.get("headers") or {}
    if not isinstance(headers, Mapping):
        raise OptionTypeError(f"headers are of type {type(headers).__name__}; give a dict of names and texts")
    found = {str(name): str(value) for name, value in headers.items()}
    if options.get("username") is not None:
        login = f"{options['username']}:{options.get('password') or ''}"
        found["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    return found
