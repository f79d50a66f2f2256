"""A job whose table names an address at which another flow's shard listens by now."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.client import JobOptions, SharedJob
from torch_dpflow.remote.cluster_address import Cluster
from torch_dpflow.remote.job_description import JobDescription
from torch_dpflow.remote.protocol import (
    Access,
    Ask,
    Draw,
    JobBeat,
    JobId,
    Join,
    Joined,
    Route,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.remote.refusals import StaleRoutingError
from torch_dpflow.remote.rpc import Result, RpcServer
from torch_dpflow.remote.transport import TransportOptions, listen

#: More fetches than a job with pauses makes while it beats this often, and far fewer than one without.
MOST_FETCHES, BEATS = 100, 2


def test_a_job_pauses_while_its_router_names_a_shard_that_is_none_of_its_flow(tmp_path: Path) -> None:
    server = RpcServer(listen(f"ipc://{tmp_path}/all"))
    table = RoutingTable(1, [Route(0, 8, "shard-000", server.address)])
    fetches = beats = 0
    beaten = threading.Event()

    def fetch(call: Any) -> None:
        nonlocal fetches
        fetches += 1
        raise StaleRoutingError("this is a shard of flow 'other@1', and not of 'f@1'")

    def beat(call: Any) -> Result:
        nonlocal beats
        if isinstance(call.body, JobBeat):
            beats += 1
            if beats >= BEATS:
                beaten.set()
        return Result(1)

    for name, body, handler in (
        ("access", Access, lambda call: Result(server.address)),
        ("join", Join, lambda call: Result(Joined(1, 8, table))),
        ("table", None, lambda call: Result(table)),
        ("start", StartEpoch, lambda call: None),
        ("draw", Draw, lambda call: Result(None, [np.arange(8).tobytes()])),
        ("want", Ask, lambda call: None),
        ("leave", JobId, lambda call: None),
        ("fetch", Ask, fetch),
        ("beat", JobBeat, beat),
    ):
        server.register(name, handler, body_type=body)
    thread = threading.Thread(target=server.serve)
    thread.start()
    cluster = Cluster(address=server.address, transport=TransportOptions())
    description = JobDescription(
        flow="f", version=1, name="job", seed=0, batch_size=4, indices=None, rank=None
    )
    try:
        with SharedJob(cluster, description, 8, False, list, JobOptions(patience_s=60.0)) as job:
            batches = job.traverse(0)

            def read() -> None:
                with suppress(UsageError):  # it is given up
                    next(batches)

            reader = threading.Thread(target=read)
            reader.start()
            assert beaten.wait(30)
            batches.close()
            reader.join()
        assert 0 < fetches < MOST_FETCHES
    finally:
        server.stop()
        thread.join()
        server.close()
