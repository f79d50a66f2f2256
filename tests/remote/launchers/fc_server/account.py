"""What tests of Function Compute share: an access key, and what is checked after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.holdings import own_threads
from tests.remote.launchers.fc_server.server import FunctionServer, Key
from tests.shared_cluster import wait

KEYS = {"AKtest": Key("sk-of-the-tests", "sts-token-1")}
#: As `dpflow deploy fc` has it.
CONFIG = {"asyncTask": True, "maxAsyncEventAgeInSeconds": 300, "maxAsyncRetryAttempts": 0}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the tests, where the vendor's tools have theirs."""
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "AKtest")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", KEYS["AKtest"].secret)
    monkeypatch.setenv("ALIBABA_CLOUD_SECURITY_TOKEN", KEYS["AKtest"].token)


@pytest.fixture(autouse=True)
def no_leaks(server: FunctionServer) -> Iterator[None]:
    """Instead of the check of all tests: the vendor's client keeps its connections. Of ours nothing is left."""
    before = own_threads()
    yield
    wait(lambda: not server.live(), what="the end of all workers")
    wait(lambda: not own_threads() - before, what="the end of the test's threads")
    server.tasks.clear()  # tests alone use names again
