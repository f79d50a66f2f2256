"""Limits and names that options and messages share."""

from __future__ import annotations

#: Most ranks of one job.
MAX_RANKS = 1024


#: What the name of a job begins with that was given none; chance decides the rest.
UNNAMED = "unnamed-"
