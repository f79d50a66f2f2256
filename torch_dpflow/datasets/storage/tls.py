"""Trusted certificates: the system's, or a bundle from an option or the environment."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any

from torch_dpflow.errors import OptionError


def tls_context(
    options: Mapping[str, Any], environ: Mapping[str, str], bundle: str | None = None
) -> ssl.SSLContext:
    """A context from the option `verify`, else from `bundle`, else from REQUESTS_CA_BUNDLE.

    `verify` is as in botocore and requests: False checks nothing, a path names a file or a directory of
    certificates.

    Raises:
        OptionError: the path has no certificates.
    """
    verify: Any = options.get("verify")
    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if verify is None:
        verify = bundle or environ.get("REQUESTS_CA_BUNDLE") or True
    if verify is True:
        return ssl.create_default_context()
    try:
        path = os.fspath(verify)
        is_folder = os.path.isdir(path)
        return ssl.create_default_context(
            cafile=None if is_folder else path, capath=path if is_folder else None
        )
    except (OSError, TypeError) as error:  # ssl's own errors are among the former
        raise OptionError(
            f"there are no certificates at {verify!r}: {error}; look at `verify`, AWS_CA_BUNDLE and "
            "REQUESTS_CA_BUNDLE, which name a file in PEM form or a directory"
        ) from error
