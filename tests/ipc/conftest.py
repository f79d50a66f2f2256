"""Fixtures of tests that open ZeroMQ sockets or send tensors between processes."""

from tests.zeromq_thread import release_thread, uncollected

__all__ = ["release_thread", "uncollected"]
