"""The platforms that can be named, imported when they are used: each needs a library that others do not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from importlib import import_module
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.platforms import settings
from torch_dpflow.platforms.members import PlatformSpec

#: By name, the module and its class, which has a default for every setting.
_KNOWN = {
    "processes": ("torch_dpflow.platforms.processes", "Processes"),
    "ray": ("torch_dpflow.platforms.ray", "Ray"),
}


def resolve(platform: str | PlatformSpec) -> PlatformSpec:
    """The platform of this name with the settings of files and the environment, or the one that is given with its own.

    Raises:
        OptionError: there is none of this name, or a setting is wrong: see `settings`.
        OptionTypeError: it is neither.
        MissingExtraError: its library is not installed.
    """
    if not isinstance(platform, str):
        if callable(getattr(platform, "open", None)) and not isinstance(platform, type):
            return platform
        raise OptionTypeError(
            f"platform={platform!r} is a {type(platform).__name__}; give one of {sorted(_KNOWN)}, or an object of "
            "torch_dpflow.platforms with settings of its own"
        )
    if platform not in _KNOWN:
        near = difflib.get_close_matches(platform, _KNOWN, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"platform={platform!r} is none of {sorted(_KNOWN)}{hint}")
    kind = _kind(platform)
    found = settings.of_table(f"platform.{platform}", kind, _tables())
    try:
        spec: PlatformSpec = kind(**found)
    except OptionError as error:
        raise OptionError(
            f"platform={platform!r}, by its settings in files or the environment: {error}"
        ) from error
    return spec


def network() -> settings.Network:
    """The table `network` of files and the environment. Raises as `resolve`."""
    return settings.Network(**settings.of_table("network", settings.Network, _tables()))


def _kind(platform: str) -> Any:
    module, name = _KNOWN[platform]
    return getattr(import_module(module), name)


def _tables() -> dict[str, Collection[str]]:
    """The names of all settings."""
    kinds = {f"platform.{name}": _kind(name) for name in _KNOWN} | {"network": settings.Network}
    return {table: [*kind.__dataclass_fields__] for table, kind in kinds.items()}
