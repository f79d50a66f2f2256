"""Where the command line prints tables: to people as wide as their terminal, to pipes and files whole."""

from __future__ import annotations

import sys

from rich.console import Console

#: Wider than any row: what is no terminal breaks no lines, and takes only what a row needs.
_UNBROKEN = 2000


def stdout_console(*, highlight: bool = True) -> Console:
    """A console on stdout that cuts nothing off where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, highlight=highlight)
