"""Communication between processes: shared memory, serialization, transport, calls, and message types."""
