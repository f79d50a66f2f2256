"""Every adapter of ours keeps the contract of members."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_dpflow.errors import PlatformError, RejectedError
from torch_dpflow.platforms.members import Adapter
from torch_dpflow.platforms.subprocesses import SubprocessAdapter
from torch_dpflow.testing.adapters import PROGRAM, AdapterContract


class TestSubprocesses(AdapterContract):
    def new_adapter(self, module: str) -> Adapter:
        return SubprocessAdapter(module)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Adapter]]:
        return {RejectedError: lambda: SubprocessAdapter(PROGRAM, python="/nowhere/python")}
