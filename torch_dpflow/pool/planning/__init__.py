"""Decisions of the pool, without input or output: placement and layout of datasets, reading ahead, request windows."""
