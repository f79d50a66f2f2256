"""Loading processes of this host: the worker's loop, the scheduler, and the start of processes."""
