"""Mappers whose workers connect as remote ones do. On Ray: `test_ray`."""

from __future__ import annotations

import pytest

pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

from tests.node_cases import check_kills


@pytest.mark.usefixtures("preloaded_workers")
def test_on_processes_that_connect_as_remote_workers_do() -> None:
    check_kills("processes", 60)
