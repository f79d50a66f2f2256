"""How long the long test disturbs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def disturbed_s(request: pytest.FixtureRequest) -> float:
    """For how long a loader on other hosts is disturbed, seconds."""
    seconds: float = request.config.getoption("--disturbed-s")
    return seconds
