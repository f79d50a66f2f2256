"""Figures of a cluster, for people."""
