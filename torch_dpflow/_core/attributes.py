"""Optional attributes of objects that users give."""

from __future__ import annotations

from typing import Any


def working(part: Any, name: str, default: Any = None) -> Any:
    """The attribute, or `default` where there is none or reading it fails.

    A property, or a `__getattr__` that looks in a dict or in an object inside, may raise any error for a name that only
    this package asks for: the object works without it, so it is as if the attribute were not there.
    """
    try:
        return getattr(part, name, default)
    except Exception:
        return default
