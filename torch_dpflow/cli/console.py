"""The console for tables: as wide as a terminal, and unlimited for pipes and files."""

from __future__ import annotations

import sys

from rich.console import Console

#: Wider than any row, so that no line is broken; a row takes only what it needs.
_UNBROKEN = 2000


def stdout_console(*, highlight: bool = True) -> Console:
    """A console on stdout that breaks no line unless stdout is a terminal."""
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, highlight=highlight)
