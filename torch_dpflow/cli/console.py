"""The console for tables: as wide as a terminal, and unlimited for pipes and files."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from torch_dpflow._core.checks import CONTROL

#: Wider than any row, so that no line is broken; a row takes only what it needs.
_UNBROKEN = 2000


def on_one_line(text: str) -> str:
    """What others have named, with line breaks and other control characters as Python writes them."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def cell(text: str) -> str:
    """What others have named, in a table."""
    return escape(on_one_line(text))


def stdout_console(*, highlight: bool = True) -> Console:
    """A console on stdout that breaks no line unless stdout is a terminal."""
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, highlight=highlight)
