"""Packing and unpacking of the user's code and data for workers beyond this host."""
