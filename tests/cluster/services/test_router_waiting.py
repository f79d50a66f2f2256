"""What a router keeps of jobs that wait for its shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import Join, Joined, RegisterShard, RouterSettings
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.errors import DeadlineError
from torch_dpflow.ipc.rpc import ClientOptions, PendingCall, RpcClient, RpcServer
from torch_dpflow.ipc.transport import listen

SPEC = FlowSpec(name="f", version=1, size=100, content="a" * 64, fingerprint={})


class Clock:
    """Seconds, as a test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_call_whose_caller_has_given_up_is_not_kept(tmp_path: Path) -> None:
    clock = Clock()
    server = RpcServer(listen(f"ipc://{tmp_path}/router"))
    router = Router(server, SPEC, RouterSettings(["shard"]), token="t", incarnation=3, clock=clock)
    indices = np.arange(100).tobytes()

    def begin(client: RpcClient, reader: str, timeout_s: float) -> PendingCall:
        join = Join(reader, SPEC.instance, 1, 0, 4, None, True)
        pending = client.begin("join", join, [indices], reply_type=Joined, timeout_s=timeout_s)
        known = router.status()["waiting"]
        while router.status()["waiting"] == known:
            server.step(0.1)
        return pending

    with RpcClient(server.address, options=ClientOptions(timeout_s=150.0)) as client:
        given_up = begin(client, "hasty", 0.01)
        with pytest.raises(DeadlineError):
            given_up.result()
        clock.now = 5.0
        patient = begin(client, "patient", 20.0)
        router.poll()
        assert router.status()["waiting"] == 1
        registering = client.begin("register_shard", RegisterShard("shard", 1, "ipc:///shard", "t"))
        while router.status()["waiting"]:
            server.step(0.1)
        registering.result()
        joined: Joined = patient.result().body
        assert (joined.generation, joined.length) == ((3 << 32) + 2, 100)
        assert [route.shard for route in joined.table.routes] == ["shard"]
    server.close()
