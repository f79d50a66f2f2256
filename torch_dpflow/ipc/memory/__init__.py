"""Shared memory between two processes of one host: an arena that one writes, and its reader in the other."""
