"""The fleet of remote workers: their number, their registration, and the replacement of missing workers."""
