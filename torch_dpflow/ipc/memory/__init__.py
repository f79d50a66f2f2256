"""Shared memory between two processes of one host: an arena in the writer, and a reader in the other process."""
