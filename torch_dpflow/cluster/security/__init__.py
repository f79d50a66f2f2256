"""Addresses, connection files, keys and certificates of a cluster."""
