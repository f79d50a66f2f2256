"""Shard service: owns the tasks, the cache and the workers of a range of a flow's samples."""
