"""Late imports: of this package's public names, because services need no torch, and of modules of extras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch_dpflow.errors import MissingExtraError


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names at first use.

    modules: for each module, relative to `package`, its public names.
    """
    refuse_copy(package)
    homes = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            names = ", ".join(sorted(homes))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {names}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})


def imported(module: str, needs: str, extra: str) -> Any:
    """Import a module of an extra. needs: start of the MissingExtraError's text, such as "Parquet needs pyarrow"."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{needs}; install it with: pip install 'torch_dpflow[{extra}]'") from error


def refuse_copy(package: str) -> None:
    """Raise ImportError if the subpackage `package` was imported as a top-level one, which a clone's root links to."""
    if package.partition(".")[0] != "torch_dpflow":
        raise ImportError(
            f"{package!r} was imported from the repository's root; import 'torch_dpflow.{package}' instead "
            "(a second copy of its classes would unpickle nowhere)"
        )
