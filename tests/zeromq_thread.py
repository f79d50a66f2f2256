"""What tests of the transport and of payloads have in common."""

import gc
from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture(scope="session", autouse=True)
def release_thread() -> None:
    """Start the thread by which pyzmq releases frames that it sent without a copy: one for the whole process.

    It stays for good, so it must be there before a test counts what it leaves behind.
    """
    zmq.Frame(bytes(200_000), copy=False)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the collector of cycles, which may be as late as it likes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
