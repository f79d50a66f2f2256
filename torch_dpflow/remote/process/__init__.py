"""What every process of a cluster is made of: its specification, heartbeat, loop and role."""
