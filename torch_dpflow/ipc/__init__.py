"""Between processes: shared memory, serialization, transport, calls, and the messages of all of them."""
