"""Decisions of the pool: pure functions and state machines."""
