"""Members as processes of this host, which call over tcp as those of any other platform do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_dpflow._core.checks import check_type
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.remote.launchers.contract import AdoptingPlatform, Launcher
from torch_dpflow.remote.launchers.subprocesses import SubprocessLauncher
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform

#: What a member runs.
MODULE = "torch_dpflow.remote.worker"
#: How often to look at all members, where that costs next to nothing, seconds: one that ends before it has called is
#: missed by nobody until then.
LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """`platform="processes"`: for trials and tests of what only other hosts need; slower than forked workers.

    Args:
        python: the interpreter of members; empty: this one, with this one's module path.
        env: variables for members, beside those of this process.

    Raises:
        OptionError: a variable of `env` has a name or value that no process can have.
        OptionTypeError: a value is of another type.
    """

    python: str = ""
    #: Not shown: it may hold keys.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    name = "processes"

    def __post_init__(self) -> None:
        check_type("python", self.python, str, "text")
        check_type("env", self.env, Mapping, "a dict")
        for variable, text in self.env.items():
            if not isinstance(variable, str) or not isinstance(text, str):
                raise OptionTypeError(
                    f"env has {variable!r} of type {type(text).__name__}; give variables and their values as text"
                )
            if not variable or "=" in variable or "\0" in variable + text:
                # Not the value, which may be a key.
                raise OptionError(
                    f"env has {variable!r}: a variable's name has no '=', and neither it nor its value NUL"
                )

    @property
    def sends_code(self) -> bool:
        return bool(self.python)  # this one's members have its path

    def check_installed(self) -> None:
        """Nothing: there is no library."""

    def check_workers(self, workers: int) -> None:
        """Nothing: it costs nothing beyond what is there."""

    def launcher(self) -> Launcher:
        path = {} if self.python else {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return SubprocessLauncher(MODULE, python=self.python or sys.executable, env={**path, **self.env})

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        return ThreadedPlatform(self.launcher(), sweep_s=LOOK_S)

    def listen_at(self) -> str:
        return "tcp://127.0.0.1:0"

    def check_listen(self, address: str) -> None:
        if not address.startswith("tcp://"):
            raise OptionError(f"listen={address!r}: members call over tcp, as at tcp://127.0.0.1:0")
