"""The position in an epoch, as data: its plan, its randomness, its state. No processes, no sockets."""
