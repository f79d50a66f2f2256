"""Connections between pool processes: control messages, records over TCP, shared memory segments."""
