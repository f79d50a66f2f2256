"""The platforms that can be named, imported when they are used: each needs a library that others do not have."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.remote.launchers import settings
from torch_dpflow.remote.launchers.contract import PlatformSpec

#: By name, the module and its class, which has a default for every setting.
_KNOWN = {
    "kubernetes": ("torch_dpflow.remote.launchers.kubernetes", "Kubernetes"),
    "lambda": ("torch_dpflow.remote.launchers.aws_lambda", "Lambda"),
    "fc": ("torch_dpflow.remote.launchers.fc", "FunctionCompute"),
    "processes": ("torch_dpflow.remote.launchers.processes", "Processes"),
    "ray": ("torch_dpflow.remote.launchers.ray", "Ray"),
}


def resolve(platform: str | PlatformSpec) -> PlatformSpec:
    """The platform of this name with the settings of files and the environment, or the one that is given with its own.

    Raises:
        OptionError: there is none of this name, or a setting is wrong: see `settings`.
        OptionTypeError: it is neither.
    """
    if isinstance(platform, str):
        if platform not in _KNOWN:
            near = difflib.get_close_matches(platform.lower(), _KNOWN, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"platform={platform!r} is none of {sorted(_KNOWN)}{hint}")
        found = settings.read(_kinds())[f"platform.{platform}"]
        spec: PlatformSpec = _kind(platform)(**{key: setting.value for key, setting in found.items()})
        return spec
    parts = {name for name in vars(PlatformSpec) if not name.startswith("_")}
    if isinstance(platform, type) and parts <= {*dir(platform)}:
        name = platform.__name__
        raise OptionTypeError(f"platform={name} is a class; did you mean {name}()?")
    if not parts <= {*dir(platform)}:
        raise OptionTypeError(
            f"platform={platform!r} is of type {type(platform).__name__}; give one of {sorted(_KNOWN)}, or an object "
            "of torch_dpflow.remote with settings of its own"
        )
    return platform


def network() -> tuple[settings.Network, str]:
    """The table `network` of files and the environment, and where its `listen` stands, for people.

    Raises OptionError as `resolve`.
    """
    found = settings.read(_kinds())["network"]
    place = found["listen"].place if "listen" in found else ""
    return settings.Network(**{key: setting.value for key, setting in found.items()}), place


def autoscale() -> settings.Autoscale:
    """The table `autoscale` of files and the environment.

    Raises OptionError as `resolve`, also where its `min` is above its `max`.
    """
    found = settings.read(_kinds())["autoscale"]
    table = settings.Autoscale(**{key: setting.value for key, setting in found.items()})
    if table.max is not None and table.min > table.max:
        place = found["min"].place
        raise OptionError(
            f"{place}: autoscale.min={table.min} is above autoscale.max={table.max}; give min <= max"
        )
    if table.max is None and "min" in found:
        raise OptionError(
            f"{found['min'].place}: autoscale.min without autoscale.max: say how many workers there may be; give both"
        )
    return table


def _kind(platform: str) -> Any:
    module, name = _KNOWN[platform]
    return getattr(import_module(module), name)


def _kinds() -> dict[str, type[Any]]:
    """The classes of all settings, by their tables."""
    return {f"platform.{name}": _kind(name) for name in _KNOWN} | {
        "network": settings.Network,
        "autoscale": settings.Autoscale,
    }
