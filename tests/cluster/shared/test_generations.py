"""Who is newer than whom is settled by numbers that are given out, whatever any clock says."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.node import ProcessView, Running
from torch_dpflow.cluster.messages.router import JobHeartbeat, JobId, Join, RegisterShard
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import ErrorKind, RemoteCallError
from torch_dpflow.ipc.messages.fields import StaleShardError
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcServer
from torch_dpflow.ipc.transport import listen

Join_ = Callable[..., SharedJob]


def keys(batches: object) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]  # type: ignore[attr-defined]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set this process's wall clock, by so many seconds from what it is."""
    now, now_ns = time.time, time.time_ns

    def step(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))

    return step


def test_a_job_on_a_host_whose_clock_is_behind_takes_up_the_name_of_one_before(
    join: Join_, flow: str, step: Callable[[float], None]
) -> None:
    first = join(flow, Numbers(40), batch_size=4, name="training")
    seen = keys(islice(first.traverse(0), 3))
    state = first.state()
    first.close()
    step(-600)
    second = join(flow, Numbers(40), batch_size=4, name="training")
    assert sorted(seen + keys(second.traverse(0, done=state))) == list(range(40))


def test_a_clock_that_steps_back_while_a_router_comes_back_holds_up_nobody(
    cluster: TestCluster, join: Join_, flow: str, step: Callable[[float], None]
) -> None:
    job = join(flow, Numbers(400), batch_size=4)
    batches = job.traverse(0)
    seen = keys(islice(batches, 3))
    for _ in range(2):
        step(-600)
        killed = cluster.kill(f"{flow}:v1/router")
        wait(lambda killed=killed: has_ended(killed), what="the router's end")
        seen += keys(islice(batches, 30))
    assert sorted(seen + keys(batches)) == list(range(400))


def test_a_service_refuses_whom_it_does_not_serve(cluster: TestCluster, join: Join_, flow: str) -> None:
    """Where a service has ended another's may listen next, and would give samples of other data."""
    join(flow, Numbers(40), batch_size=4, name="training")
    router = cluster.process(f"{flow}:v1/router").address
    with find_cluster(cluster.address).connect(router, timeout_s=60) as client:
        for method, body in (
            ("join", Join("stranger", "other:v1", 1, 0, 4)),
            ("heartbeat", JobHeartbeat(JobId("training", 1, "other:v1"))),
            ("leave", JobId("training", 1 << 60, "other:v1")),
        ):
            with pytest.raises(RemoteCallError, match=f"the router of flow '{flow}:v1', and not of") as caught:
                client.call(method, body)
            assert caught.value.kind == ErrorKind.MISDIRECTED


#: A shard's place in its router's table, without the rest of the shard.
REGISTERED = """
import os, sys
from types import SimpleNamespace
from torch_dpflow.ipc.rpc import RpcServer
from torch_dpflow.cluster.services.service import ClusterPlace, ServiceSpec
from torch_dpflow.cluster.shard.run import RouterCalls
service = ServiceSpec(id="f:v1/shard-000", role="shard", incarnation=7, arguments=b"", settings=b"", address="",
                   place=ClusterPlace(directory=sys.argv[1]))
shard = SimpleNamespace(server=RpcServer(service.listen()), cache_samples=0, lookahead_requests=list)
RouterCalls(service, shard, "f:v1/router")
sys.stdin.read()
"""


def test_a_shard_that_has_been_replaced_does_not_take_its_place_back(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/node"  # one server is node and router
    tried: list[int] = []

    def refuse(call: IncomingCall) -> None:
        shard: RegisterShard = call.body
        tried.append(shard.incarnation)
        raise StaleShardError("another has taken its place")

    running = Running(1, [ProcessView("f:v1/router", "router", 1, 1, address, {})])
    server = RpcServer(listen(address))
    server.register("changes", lambda call: Result(running), body_type=int)
    server.register("register_shard", refuse, body_type=RegisterShard)
    with interpreter(REGISTERED, str(tmp_path), stdin=-1) as shard:
        while len(tried) < 2:
            server.step(0.1)
        shard.communicate("")
    server.close()
    assert set(tried) == {7}
