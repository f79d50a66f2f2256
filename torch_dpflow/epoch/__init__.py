"""Where an epoch is, as data: its plan, its randomness, its state; nothing here starts a process or opens a socket."""
