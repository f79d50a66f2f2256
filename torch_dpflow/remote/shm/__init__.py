"""Shared memory between two processes of one host."""
