"""What tests of the transport and of parcels have in common."""

from tests.zeromq_thread import release_thread, uncollected

__all__ = ["release_thread", "uncollected"]
