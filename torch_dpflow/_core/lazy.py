"""Public names of packages, imported at first use, because services and most commands need no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose public names are in these modules."""
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


def refuse_copy(package: str) -> None:
    """Raise ImportError for a package that is imported through its link at the repository's root."""
    if package.partition(".")[0] != "torch_dpflow":
        raise ImportError(
            f"{package!r} was imported from the repository's root; import 'torch_dpflow.{package}' instead "
            "(a second copy of its classes would unpickle nowhere)"
        )
