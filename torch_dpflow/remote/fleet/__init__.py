"""The fleet of remote workers: their number, their registration, and replacement of missing ones."""
