"""Process settings of the script that affect samples, copied to workers that are not forked from its process.

Without the copy, workers of a shared flow or of a platform would keep the defaults.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

#: Attributes of modules that affect decoding: module, name, and default. Read only if the script has imported the
#: module.
_ATTRIBUTES: tuple[tuple[str, str, Any], ...] = (
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
    ("PIL.Image", "MAX_IMAGE_PIXELS", 1024 * 1024 * 1024 // 4 // 3),
)
#: Maximum number of texts that are checked as paths, and maximum characters of such a text.
MAX_LOOKED_AT, MAX_PATH_CHARS = 1000, 4096
_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """Process settings of a script. The fields' defaults are those of a new process."""

    default_dtype: torch.dtype = torch.float32
    #: As `numpy.seterr` takes it.
    numpy_errors: dict[str, Any] = field(default_factory=_NUMPY_ERRORS.copy)
    #: Module, name and value.
    attributes: tuple[tuple[str, str, Any], ...] = ()
    #: Whether torch uses deterministic algorithms only, and whether it only warns if there is none.
    deterministic: tuple[bool, bool] = (False, False)
    #: As in `torch.set_float32_matmul_precision`.
    matmul_precision: str = "highest"
    #: The current directory, in which relative paths are looked for; empty if it was removed.
    directory: str = ""
    #: `sys.argv[0]`, without arguments: these differ in jobs of a hyperparameter search, which must send equal content.
    script: str = ""

    @classmethod
    def capture(cls) -> ScriptSettings:
        """Return the settings of this process, and of this thread for numpy."""
        found = [(module, name, usual, vars(sys.modules.get(module, cls))) for module, name, usual in _ATTRIBUTES]
        return cls(
            default_dtype=torch.get_default_dtype(),
            numpy_errors=dict(np.geterr()),
            attributes=tuple((m, name, has[name]) for m, name, usual, has in found if has.get(name, usual) != usual),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            matmul_precision=torch.get_float32_matmul_precision(),
            directory=current_directory(),
            script=sys.argv[0] if sys.argv else "",
        )

    def apply(self) -> None:
        """Apply the settings to this process; numpy's settings to this thread only.

        If the script's directory does not exist, as on another host, this process stays in its current directory.
        """
        if self.directory and self.directory != (here := current_directory()):
            sys.path[:] = [os.path.join(here, path) for path in sys.path]
            with suppress(OSError):
                os.chdir(self.directory)
        if self.script:
            sys.argv[:] = [self.script]
        torch.set_default_dtype(self.default_dtype)
        np.seterr(**self.numpy_errors)
        for module, name, value in self.attributes:
            with suppress(ImportError):  # then no dataset can use it either
                setattr(importlib.import_module(module), name, value)
        # Only if it differs: torch imports its compiler for this call, which takes seconds.
        deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        if self.deterministic != deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        torch.set_float32_matmul_precision(self.matmul_precision)

    def describe(self) -> str:
        """Return a text that names the settings that change samples; empty if all have their defaults."""
        parts = [f"{module}.{name}={value!r}" for module, name, value in self.attributes]
        if self.default_dtype is not torch.float32:
            parts.insert(0, f"torch's default dtype {self.default_dtype}")
        if self.numpy_errors != _NUMPY_ERRORS:
            parts.append(f"numpy.seterr {self.numpy_errors}")
        return ", ".join(parts)


def current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


class RelativePaths:
    """Search for paths relative to the current directory, in texts that are sent to workers."""

    def __init__(self) -> None:
        #: The first relative path that was found; empty: none.
        self.found = ""
        #: How many more texts may be checked.
        self._left = MAX_LOOKED_AT

    def look(self, text: str) -> None:
        """Set `found` to this text if it is the first that is the relative path of an existing file or directory.

        Texts of only dots and slashes do not count, nor any after `MAX_LOOKED_AT` checked texts.
        """
        if self.found or not self._left or len(text) > MAX_PATH_CHARS or not text.strip("./") or os.path.isabs(text):
            return
        self._left -= 1
        with suppress(OSError, ValueError):
            self.found = text if os.path.lexists(text) else ""

    def look_in(self, values: Any) -> None:
        """Check the first text in nested containers, and first keys of dicts if they look like paths; see `look`."""
        for _ in range(3):
            if type(values) is dict and values:
                key = next(iter(values))
                if type(key) is str and ("/" in key or "." in key):  # else it may be a name
                    self.look(key)
                values = values[key]
            elif type(values) in (list, tuple) and values:
                values = values[0]
        if type(values) is str:
            self.look(values)
