"""What tests of Lambda share: a server with its environments, credentials, and what is checked after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.holdings import own_threads
from tests.remote.launchers.lambda_server import LambdaServer, lambda_server
from tests.shared_cluster import wait


@pytest.fixture(scope="module", name="server")
def kept_server(no_leaks_of_module: None) -> Iterator[LambdaServer]:
    """One for all tests of a module: its environments take a second to start, and are kept."""
    with lambda_server(cold_start_s=0) as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(server: LambdaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where AWS's tools have theirs."""
    for variable, text in server.env.items():
        monkeypatch.setenv(variable, text)


@pytest.fixture(autouse=True)
def no_leaks(server: LambdaServer, credentials: None) -> Iterator[None]:
    """Instead of the check of all tests: environments stay. No call is held, and no function runs."""
    before = own_threads()
    yield
    wait(lambda: not own_threads() - before, what="the end of the test's threads")
    wait(lambda: not server.running, what="the end of all invocations")
    server.faults.clear()
