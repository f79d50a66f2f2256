"""What tests of the transport have in common."""

import pytest
import zmq


@pytest.fixture(scope="session", autouse=True)
def release_thread() -> None:
    """Start the thread by which pyzmq releases frames that it sent without a copy: one for the whole process.

    It stays for good, so it must be there before a test counts what it leaves behind.
    """
    zmq.Frame(bytes(200_000), copy=False)
