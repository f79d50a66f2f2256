"""Modules that cost seconds and memory to import, imported by the tests that need them.

Every test process imports all tests' modules and forks thousands of workers: each copies the page table of what the
process holds, and shares with it what it touches.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """A module, imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # as pytest asks of everything that a tests' module has
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)

    def __reduce__(self) -> Any:
        return Later, (self._name,)
