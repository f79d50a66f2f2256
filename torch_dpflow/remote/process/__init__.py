"""What every process of a cluster consists of: its specification, heartbeats, main loop and role."""
