"""What commands change in a process that they have for themselves, and a test has not."""

import sys

import pytest


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some commands look for modules in the working directory, too."""
    monkeypatch.setattr(sys, "path", [*sys.path])
