"""Figures of a cluster, for display."""
