"""The platforms that can be named, imported when they are used: each needs a library that others do not have."""

from __future__ import annotations

import difflib
from importlib import import_module

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.platforms.members import PlatformSpec

#: By name, the module and its class, which has a default for every setting.
_KNOWN = {
    "processes": ("torch_dpflow.platforms.processes", "Processes"),
    "ray": ("torch_dpflow.platforms.ray", "Ray"),
}


def resolve(platform: str | PlatformSpec) -> PlatformSpec:
    """The platform of this name with its default settings, or the one that is given with its own.

    Raises:
        OptionError: there is none of this name.
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
    module, name = _KNOWN[platform]
    spec: PlatformSpec = getattr(import_module(module), name)()
    return spec
