"""Loading processes: the worker's loop, the scheduler, and the start of processes on this host."""
