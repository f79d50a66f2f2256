"""What tests against a real cloud share: they cost money, so nothing runs unless somebody asks for it by name.

`make cloud-test` runs them, with the credentials that the vendor's tools find and the settings of dpflow.toml, and:

- `DPFLOW_TEST_CLOUD`: the platforms to test, as `fc,lambda,kubernetes`.
- `DPFLOW_TEST_IMAGE_FC`, `DPFLOW_TEST_IMAGE_LAMBDA`, `DPFLOW_TEST_IMAGE_KUBERNETES`: the image, as `dpflow image` has
  it built, in a registry of the region or the cluster. For the contract of launchers it also contains
  `tests/contracts/processes.py`, by this path in a folder of PYTHONPATH.
- `DPFLOW_TEST_NEAR`: the address of this host that functions and pods reach, at any port.

Nobody has run them yet.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.loader_cases import Augmented, assert_same, epochs
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.loader.platform_check import check_platform


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
        pytest.fail(f"set {variable}: see tests/remote/launchers/cloud/account.py")
    return value


def check_batches(settings: Any) -> None:
    """Whether a platform passes its check, and its workers give the batches of local ones."""
    listen = f"tcp://{needed('DPFLOW_TEST_NEAR')}:0"
    for finding in check_platform(settings, listen=listen):
        print(finding.text)
        assert finding.good, finding.text
    sides = [
        epochs(
            DPFlowDataLoader(
                Augmented(64),
                batch_size=4,
                shuffle=True,
                num_workers=2,
                generator=torch.Generator().manual_seed(7),
                platform=platform,
                options=LoaderOptions(seeding="batch", listen=listen if platform else None),
            )
        )
        for platform in (settings, None)
    ]
    assert_same(*sides)
