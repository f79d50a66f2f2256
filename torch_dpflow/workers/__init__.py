"""Processes that load, on this host: the loop of a worker, the scheduler, and how they are started."""
