"""The user's code and data on their way to workers beyond this host."""
