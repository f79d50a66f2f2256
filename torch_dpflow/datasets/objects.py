"""Looks at the samples' own bytes where they lie, on any storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import fsspec


class Objects:
    """Sizes and bytes of objects by URL; names are literal: "#", "?" and "::" may be part of them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def size(self, url: str) -> int | None:
        """Bytes; None where the storage does not say. Raises FileNotFoundError."""
        fs, path = self._locate(url)
        entry = fs.info(path)
        if entry["type"] == "directory":
            raise FileNotFoundError(f"{url} is a directory")
        size = entry.get("size")
        return None if size is None else int(size)

    def read(self, url: str, offset: int | None = None, length: int | None = None) -> bytes:
        """The whole object, or `length` bytes of it from `offset` on. Raises FileNotFoundError."""
        fs, path = self._locate(url)
        if offset is None or length is None:
            return bytes(fs.cat_file(path))
        return bytes(fs.cat_file(path, start=offset, end=offset + length)) if length else b""

    def _locate(self, url: str) -> tuple[Any, str]:
        protocol, separator, _ = url.partition("://")
        fs = fsspec.filesystem(protocol if separator else "file", **self._options)
        return fs, fs._strip_protocol(url if separator else os.path.abspath(url))
