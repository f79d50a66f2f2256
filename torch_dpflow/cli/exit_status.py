"""Exit statuses of commands."""

from __future__ import annotations

#: Control-C has ended it, as shells have it.
INTERRUPTED = 130
