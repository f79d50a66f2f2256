"""Packing of the user's code and data for workers beyond this host, and unpacking there."""
