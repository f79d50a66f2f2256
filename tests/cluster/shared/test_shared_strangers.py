"""A cluster that listens over tcp: jobs with its keys read, and a stranger gets nothing."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator

import pytest

from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.cluster.messages.coordinator import ContentPiece, ContentRequest, FlowSpec
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.cluster.messages.shard import Ask
from torch_dpflow.cluster.security.connection_file import find_cluster, generate_keys
from torch_dpflow.errors import DeadlineError, OptionError, PeerLostError, RemoteCallError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.ipc.transport import TransportOptions


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that listens over tcp."""
    started = TestCluster.start_over_tcp(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


def test_a_job_with_the_connection_file_reads_over_tcp_and_finds_a_service_again(
    cluster: TestCluster, flow: str
) -> None:
    options = JobOptions(idle_s=3.0)
    with open_job(flow, Numbers(400), address=cluster.address, batch_size=10, options=options) as job:
        assert find_cluster(cluster.address).address.startswith("tcp://127.0.0.1:")
        reading = job.traverse(0)
        keys = [int(key) for _ in range(5) for key in next(reading)[1]]
        assert all(view.address.startswith("tcp://") for view in cluster.processes() if view.address)
        cluster.kill(f"{flow}:v1/router")
        keys += [int(key) for _, labels in reading for key in labels]
    assert sorted(keys) == list(range(400))


def test_the_connection_file_is_its_owners(cluster: TestCluster) -> None:
    assert stat.S_IMODE(os.stat(cluster.address).st_mode) == 0o600


@pytest.mark.parametrize("keys", ["none", "others"])
def test_a_stranger_is_not_answered(cluster: TestCluster, keys: str) -> None:
    address = find_cluster(cluster.address).address
    others = generate_keys(address).client_keys()
    transport = TransportOptions(send_timeout_s=0.5, keys=None if keys == "none" else others)
    with (
        RpcClient(address, options=ClientOptions(timeout_s=1.0), transport=transport) as stranger,
        pytest.raises((DeadlineError, PeerLostError), match=r"was not answered|is our key accepted"),
    ):
        stranger.call("flows")
    assert cluster.flows() is not None


def test_an_address_beyond_this_host_takes_keys() -> None:
    with pytest.raises(OptionError, match="give the connection file"):
        find_cluster("tcp://192.0.2.1:5555")


def test_wrong_numbers_and_names_get_a_clear_error(cluster: TestCluster, flow: str) -> None:
    good = FlowSpec(name=flow, version=1, size=10, content="0" * 64, fingerprint={})
    with cluster.coordinator() as client:
        for wrong, message in (
            ({"name": "../etc/passwd"}, "a letter or digit first"),
            ({"shards": 0}, "shards=0 is out of range; give an int from 1 to 10"),
            ({"memory_bytes": 0}, "memory_bytes=0"),
            ({"workers": 10**9}, "workers=1000000000"),
        ):
            fields = {name: getattr(good, name) for name in FlowSpec.__struct_fields__}
            with pytest.raises(RemoteCallError, match=message):
                client.call("register", FlowSpec(**{**fields, **wrong}))
        unasked = ContentPiece(hashlib.sha256(b"x").hexdigest(), 0, 1)
        assert client.call("store", unasked, [b"x"], reply_type=int | None).body is None
        with pytest.raises(RemoteCallError, match=r"no content .* is stored"):
            client.call("content", ContentRequest(unasked.digest, 0))
        for wrong_piece, frames, told in (
            (ContentPiece("../state", 0, 1), [b"x"], "not a valid message"),
            (ContentPiece("a" * 64, 0, 1 << 40), [b"x"], "1099511627776 bytes; 1073741824 are allowed"),
            (ContentPiece("a" * 64, 0, 1), [], "is one frame of 1 to 4194304 bytes"),
            (ContentPiece("a" * 64, 0, 5 << 20), [bytes(5 << 20)], "is one frame of 1 to 4194304 bytes"),
        ):
            with pytest.raises(RemoteCallError, match=told):
                client.call("store", wrong_piece, frames)
        with pytest.raises(RemoteCallError, match="is not registered"):
            client.call("access", ["unknown", 1])


def test_a_shard_refuses_what_a_job_may_not_ask(cluster: TestCluster, flow: str) -> None:
    options = JobOptions(idle_s=3.0)
    with open_job(flow, Numbers(10), address=cluster.address, options=options):
        wait(lambda: any(view.address for view in cluster.processes(f"{flow}:v1/shard-000")))
        shard = next(view for view in cluster.processes(f"{flow}:v1/shard-000") if view.role == "shard")
        with find_cluster(cluster.address).connect(shard.address, timeout_s=60) as client:
            job = JobId("intruder", 1, f"{flow}:v1")
            for ask, message in (
                (Ask(job, 9, 0, 0, [1], [10], []), "has 10 samples"),
                (Ask(job, 9, 0, 0, [1, 2], [3], []), "one for each is required"),
                (Ask(job, 9, 0, 0, [1], [3], [], 2), "at most 1, the number of requested samples"),
                (Ask(job, 0, 0, 0, [1], [3], []), "is out of date"),
                (Ask(JobId("intruder", 1, "other:v1"), 9, 0, 0, [1], [3], []), "and not of 'other:v1'"),
            ):
                with pytest.raises(RemoteCallError, match=message):
                    client.call("fetch", ask)
            with pytest.raises(RemoteCallError, match="not a valid message"):
                client.call("fetch", {"job": "x"})
            client.call("leave", job)
