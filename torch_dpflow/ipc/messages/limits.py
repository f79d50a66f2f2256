"""Limits and names that the options of users share with messages."""

from __future__ import annotations

#: Most ranks of one job.
MAX_RANKS = 1024


#: The beginning of the names that are drawn for jobs without one.
UNNAMED = "unnamed-"
