"""Registry of platforms by name. A platform's library is imported only when the platform is used."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from importlib import import_module
from typing import Any, cast

from torch_dpflow import errors
from torch_dpflow.errors import DPFlowError, OptionError, OptionTypeError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers import settings
from torch_dpflow.remote.launchers.contract import NodePlatform, PlatformSpec

#: By name, the module and its class of settings (`PlatformSpec`), which has a default for every setting. A name is one
#: word of lower-case letters: variables of the environment, as DPFLOW_PLATFORM_RAY_CPUS, are split at underscores, and
#: shells set none with a hyphen.
_KNOWN = {
    "kubernetes": ("torch_dpflow.remote.launchers.kubernetes", "Kubernetes"),
    "lambda": ("torch_dpflow.remote.launchers.aws_lambda", "Lambda"),
    "fc": ("torch_dpflow.remote.launchers.fc", "FunctionCompute"),
    "processes": ("torch_dpflow.remote.launchers.processes", "Processes"),
    "ray": ("torch_dpflow.remote.launchers.ray", "Ray"),
}
#: Platforms that have been tested against test doubles of their control planes only.
_EXPERIMENTAL = ("fc", "lambda")
#: Platforms whose settings are a `NodePlatform`.
_WITH_NODES = ("ray",)


def resolve(platform: str | PlatformSpec) -> PlatformSpec:
    """Return a platform's settings, from files and the environment if `platform` is a name, else `platform` itself.

    Raises:
        OptionError: there is no platform of this name, among others: see `settings.read`.
        OptionTypeError: `platform` is neither a name nor settings.
    """
    if isinstance(platform, str):
        if platform not in _KNOWN:
            near = difflib.get_close_matches(platform.lower(), _KNOWN, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"platform={platform!r} is none of {sorted(_KNOWN)}{hint}")
        found = settings.read(_KINDS)[f"platform.{platform}"]
        spec: PlatformSpec = _kind(platform)(**{key: setting.value for key, setting in found.items()})
        if platform in _EXPERIMENTAL:
            warn_experimental(platform)
        return spec
    parts = {name for name in vars(PlatformSpec) if not name.startswith("_")}
    if isinstance(platform, type) and parts <= {*dir(platform)}:
        name = platform.__name__
        raise OptionTypeError(f"platform={name} is a class; did you mean {name}()?")
    if not parts <= {*dir(platform)}:
        raise OptionTypeError(
            f"platform={platform!r} is of type {type(platform).__name__}; give one of {sorted(_KNOWN)}, or an object "
            "of torch_dpflow.remote"
        )
    for name in _EXPERIMENTAL:
        if _KNOWN[name] == (type(platform).__module__, type(platform).__name__):
            warn_experimental(name)
    return platform


@cache
def warn_experimental(name: str) -> None:
    """Warn, once per process, that this platform has never been tested on its real cloud."""
    SERVICE.warning("platform %s is experimental: tested against test doubles, never on its cloud", name)


def network() -> tuple[settings.Network, str]:
    """Return the settings of the table `network`, and the place that sets `listen`.

    The place is a file and line, or a variable; empty if nothing sets it. Raises the errors of `settings.read`.
    """
    found = settings.read(_KINDS)["network"]
    place = found["listen"].place if "listen" in found else ""
    return settings.Network(**{key: setting.value for key, setting in found.items()}), place


def autoscale() -> settings.Autoscale:
    """Return the settings of the table `autoscale`, from files and the environment.

    Raises the errors of `settings.read`, and OptionError if `min` is above `max` or given without `max`.
    """
    found = settings.read(_KINDS)["autoscale"]
    table = settings.Autoscale(**{key: setting.value for key, setting in found.items()})
    if table.max is not None and table.min > table.max:
        place = found["min"].place
        raise OptionError(f"{place}: autoscale.min={table.min} is above autoscale.max={table.max}; give min <= max")
    if table.max is None and "min" in found:
        raise OptionError(
            f"{found['min'].place}: autoscale.min without autoscale.max: say how many workers there may be; give both"
        )
    return table


def _kind(platform: str) -> Any:
    """Return the class of a platform's settings. Raises OptionError if its module cannot be imported."""
    module, name = _KNOWN[platform]
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise OptionError(
            f"platform={platform!r} cannot be imported: {type(error).__name__}: {error}; repair the library that it "
            "imports, or use another platform"
        ) from error


#: By table, what returns the class of its settings: a platform whose library is broken concerns only jobs that name it.
_KINDS: dict[str, Callable[[], type[Any]]] = {
    **{f"platform.{name}": partial(_kind, name) for name in _KNOWN},
    "network": lambda: settings.Network,
    "autoscale": lambda: settings.Autoscale,
}


#: Timeout of `check_reachable`, in seconds.
CHECK_S = 120.0


def check_reachable(platform: str, listen: str, *, nodes: bool = False) -> str:
    """Check, in a separate process, that a platform answers and accepts the address `listen`.

    nodes: whether to call `check_nodes` too, if the platform can run nodes, and return its result. Otherwise, the
        result is empty. listen: address for workers, for `check_listen`; empty: the platform's default.

    Raises the errors of these calls, and OptionError if the platform does not answer within `CHECK_S`.
    """
    # The platform's library may start threads or end the process.
    command = [sys.executable, "-m", __name__, platform, listen, "nodes" if nodes else ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        raise OptionError(
            f"platform={platform!r} does not answer within {CHECK_S:g} s; is it up, and reachable from here?"
        ) from None
    if done.returncode == 0:
        return str(json.loads(done.stdout.splitlines()[-1]))
    try:
        name, text = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        name, text = "OptionError", f"platform={platform!r} cannot be used: {done.stderr.strip()[-2000:]}"
    kind: type[DPFlowError] = getattr(errors, name, OptionError)
    raise kind(text)


def with_nodes() -> list[str]:
    """Return the names of the platforms that can run nodes of a cluster."""
    return [*_WITH_NODES]


def as_nodes(platform: PlatformSpec) -> NodePlatform | None:
    """Return `platform` if it can run nodes of a cluster; otherwise None."""
    return cast(NodePlatform, platform) if hasattr(platform, "open_nodes") else None


def _check(platform: str, listen: str, nodes: str) -> int:
    address = ""
    try:
        spec = resolve(platform)
        with closing(spec.launcher()) as launcher:
            launcher.check()
        if nodes and (platform_of_nodes := as_nodes(spec)) is not None:
            address = platform_of_nodes.check_nodes()
        if listen:
            spec.check_listen(listen)
        elif not nodes:
            spec.listen_at()
    except DPFlowError as error:
        print(json.dumps((type(error).__name__, str(error))), flush=True)
        return 1
    print(json.dumps(address), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_check(*sys.argv[1:4]))
