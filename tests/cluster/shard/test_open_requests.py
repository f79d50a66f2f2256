"""How many samples a job may have requested from a shard and not received."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.cluster.messages.shard import Ask, Served, ShardSettings
from torch_dpflow.cluster.shard import server as shard_server
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import RemoteCallError
from torch_dpflow.ipc.rpc import RpcClient
from torch_dpflow.ipc.transport import listen


def test_samples_ahead_of_need_leave_room_for_those_that_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_server, "MAX_WANTS", 8)
    spec = FlowSpec(name="f", version=1, size=100, content="a" * 64, fingerprint={})
    settings = ShardSettings(1, 1 << 20)
    shard = SampleShard(listen(f"ipc://{tmp_path}/shard"), spec, settings, token="t", end_worker=lambda *_: None)
    thread = threading.Thread(target=shard.server.serve)
    thread.start()
    client = RpcClient(shard.server.address)

    def ask(first: int, end: int, *, ahead: int = 0, taken: tuple[int, ...] = ()) -> Ask:
        numbers = list(range(first, end))
        return Ask(JobId("job", 1, spec.instance), 1, 0, 0, numbers, numbers, list(taken), ahead)

    def want(first: int, end: int, *, taken: tuple[int, ...] = ()) -> int:
        """Request samples; return how many the shard has taken on since it started."""
        client.call("want", ask(first, end, taken=taken))
        return int(shard.status()["requested"])

    try:
        assert want(0, 6) == 6
        assert want(6, 12) == 8  # the last four are left out
        # Requested before: these take no room, and are awaited although there is none.
        client.begin("fetch", ask(0, 6, ahead=2), reply_type=Served)
        client.begin("fetch", ask(8, 16, ahead=1), reply_type=Served)
        assert want(90, 92) == 15
        with pytest.raises(RemoteCallError, match="job 'job' has requested 18 samples; 16 are allowed"):
            client.call("fetch", ask(20, 23), reply_type=Served)
        assert want(90, 92, taken=tuple(range(15))) == 17
    finally:
        client.close()
        shard.server.stop()
        thread.join()
        shard.server.close()
