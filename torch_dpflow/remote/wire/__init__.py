"""Every struct and limit that two processes agree on. No torch, no sockets."""
