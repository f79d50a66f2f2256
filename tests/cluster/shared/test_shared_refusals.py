"""Flows of a cluster whose platform starts no worker any more: jobs, the log and `dpflow workers` say why."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from tests.cluster.shared.function_cluster import FunctionCluster, told
from tests.cluster.shared.test_shared_platform import Join, keys
from tests.shared_cluster import wait
from tests.shared_datasets import Numbers
from torch_dpflow.cli.main import root
from torch_dpflow.errors import WorkerStartError

#: What is a secret of the double, by its platform, and what whoever has another one is told.
SECRETS = {
    "fc": ("secret", "400 SignatureDoesNotMatch"),
    "lambda": ("secret", "403 InvalidSignatureException"),
    "kubernetes": ("token", "401 Unauthorized"),
}


@pytest.fixture
def cluster(functions: FunctionCluster) -> Any:
    return functions.cluster


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Instances stay, and the vendor's client keeps its connections."""


@pytest.mark.slow
def test_credentials_that_are_valid_no_more_are_told_to_jobs_in_the_log_and_by_the_command(
    functions: FunctionCluster, join: Join, flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, double = functions.cluster, functions.double
    name, said = SECRETS[double.platform]
    owner: Any = double.server
    if double.platform == "fc":
        owner = double.server.keys["AKtest"]
    elif double.platform == "lambda":
        owner = double.server.credentials
    monkeypatch.setattr(owner, name, "another")
    job = join(flow, Numbers(64), batch_size=8, workers=2)
    with pytest.raises(WorkerStartError, match=f"no worker can be had of platform '{double.platform}'.*{said}"):
        list(job.traverse(0))
    assert not double.live()
    assert any("no more workers: " in line and said in line for line in cluster.log.read_text().splitlines())
    wait(lambda: said in told(cluster)["refusal"], what="the next heartbeat")
    result = CliRunner().invoke(root, ["workers", "--address", cluster.address])
    assert result.stderr.startswith(f"platform {double.platform} refuses workers: dpf-")
    assert said in result.stderr
    monkeypatch.undo()
    if double.platform == "fc":
        return  # half a minute later, as with the others
    wait(lambda: readable(job), what="workers, once that is mended")
    wait(lambda: not told(cluster)["refusal"], what="the next heartbeat")


def readable(job: Any) -> bool:
    """Whether an epoch can be read; for half a minute after a failure nothing is tried."""
    try:
        return sorted(keys(job.traverse(0))) == list(range(64))
    except WorkerStartError:
        return False
