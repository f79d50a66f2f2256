"""What tests against a real cloud share: they cost money, so nothing runs unless somebody asks for it by name.

`make cloud-test` runs them, with the credentials that the vendor's tools find and the settings of dpflow.toml, and:

- `DPFLOW_TEST_CLOUD`: the platforms to test, as `fc,kubernetes`.
- `DPFLOW_TEST_IMAGE_FC`, `DPFLOW_TEST_IMAGE_KUBERNETES`: the image, as `dpflow image` has it built, in a registry
  of the region or the cluster.
- `DPFLOW_TEST_NEAR`: the address of this host that functions and pods reach, at any port.

Nobody has run them yet.
"""

from __future__ import annotations

import os

import pytest


def cloud(platform: str) -> list[pytest.MarkDecorator]:
    """The marks of a module of tests against a platform."""
    asked = os.environ.get("DPFLOW_TEST_CLOUD", "").split(",")
    reason = f"costs money: DPFLOW_TEST_CLOUD={platform} make cloud-test"
    return [
        pytest.mark.cloud,
        pytest.mark.timeout(1200),
        pytest.mark.skipif(platform not in asked, reason=reason),
    ]


def needed(variable: str) -> str:
    """A variable that has to be set."""
    value = os.environ.get(variable, "")
    if not value:
        pytest.fail(f"set {variable}: see tests/platforms/cloud/account.py")
    return value
