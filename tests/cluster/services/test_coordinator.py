"""Whom a coordinator lets in where the cluster has room for so many flows, or shards, only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.new_process import in_fork
from torch_dpflow.cluster.control.flow_processes import launches_of
from torch_dpflow.cluster.control.flow_registry import UNREAD_S
from torch_dpflow.cluster.control.node_table import NodeTable
from torch_dpflow.cluster.messages.coordinator import Access, ClusterLimits, FlowSpec, FlowView, Scale
from torch_dpflow.cluster.messages.node import Launch, ProcessView
from torch_dpflow.cluster.services import coordinator as services
from torch_dpflow.cluster.services.contents import Contents
from torch_dpflow.cluster.services.coordinator import Coordinator
from torch_dpflow.cluster.services.service import WorkerPlatform, ask_in
from torch_dpflow.cluster.services.state_store import WriteBehindStore, open_store
from torch_dpflow.errors import DeadlineError, ErrorKind, RemoteCallError
from torch_dpflow.ipc.rpc import RpcClient, RpcServer
from torch_dpflow.ipc.transport import listen

CONTENT = "0" * 64


def spec(name: str) -> FlowSpec:
    return FlowSpec(name=name, version=1, size=10, content=CONTENT, fingerprint={})


def router(name: str, jobs: int = 0) -> ProcessView:
    return ProcessView(f"{name}:v1/router", "router", 1, 1, f"ipc:///{name}", {"jobs": jobs})


def test_a_coordinator_that_starts_anew_admits_nobody_before_it_knows_what_runs(tmp_path: Path) -> None:
    """It let a flow in beside as many as there was room for, and one of those lost its services."""
    in_fork(admit_late, tmp_path)


def admit_late(folder: Path) -> None:
    (folder / "contents").mkdir()
    (folder / "contents" / CONTENT).touch()
    state = WriteBehindStore(lambda: open_store(str(folder / "state")), "owner")
    older = "@1"  # the spelling of an older release
    for name, version in (("a", older), ("b", ":v1"), ("c", ":v1"), ("d", older)):
        state.put(f"flow/{name}{version}", msgspec.msgpack.encode(spec(name)))
    now = [0.0]
    server = RpcServer(listen(f"ipc://{folder}/coordinator"))
    contents, limits = Contents(folder / "contents"), ClusterLimits(workers=2)
    coordinator = Coordinator(server, state, contents, limits, clock=lambda: now[0])
    assert state.find("flow/") == [f"flow/{name}:v1" for name in "abcd"]
    threading.Thread(target=server.serve, daemon=True).start()
    with RpcClient(server.address) as client:
        access = partial(client.call, "access", Access("d", 1), reply_type=str)
        with pytest.raises(RemoteCallError, match="has just started") as refused:
            access()
        assert refused.value.kind is ErrorKind.OVERLOADED
        # More than there is room for, as one may find it.
        ask_in(server, lambda: coordinator.observe([router(name) for name in "abc"]))
        with pytest.raises(
            RemoteCallError, match=r"'d' cannot start: 2 flows take all.*; finish or delete a half-read iterator"
        ) as full:
            access()
        assert full.value.kind is ErrorKind.OVERLOADED  # its job waits
        now[0] = UNREAD_S
        with pytest.raises(DeadlineError):
            access(timeout_s=0.2)  # waits for its router
    assert [flow.state for flow in ask_in(server, coordinator.views)[0]].count("idle") == 2
    launched = {launch.id for launch in ask_in(server, coordinator.desired) if launch.role == "router"}
    assert launched == {"c:v1/router", "d:v1/router"}


def test_workers_that_cannot_start_are_needed_only_while_a_job_reads(tmp_path: Path) -> None:
    in_fork(need_workers, tmp_path)


def need_workers(folder: Path) -> None:
    (folder / "contents").mkdir()
    (folder / "contents" / CONTENT).touch()
    state, now = WriteBehindStore(lambda: open_store(str(folder / "state")), "owner"), [0.0]
    state.put("flow/a:v1", msgspec.msgpack.encode(spec("a")))
    server = RpcServer(listen(f"ipc://{folder}/coordinator"))
    coordinator = Coordinator(server, state, Contents(folder / "contents"), ClusterLimits(), clock=lambda: now[0])
    for jobs, needed in ((1, True), (0, False), (1, True)):
        for _ in range(2):
            now[0] += UNREAD_S
            coordinator.observe([router("a", jobs)])
        assert {one.needed for one in coordinator.desired() if one.role == "worker"} == {needed}


def test_more_shards_than_there_are_ports_for_workers_are_refused_at_once(tmp_path: Path) -> None:
    in_fork(scale_up, tmp_path)


def scale_up(folder: Path) -> None:
    (folder / "contents").mkdir()
    server = RpcServer(listen(f"ipc://{folder}/coordinator"))
    state = WriteBehindStore(lambda: open_store(str(folder / "state")), "owner")
    place = WorkerPlatform(name="processes", listen_at="tcp://127.0.0.1:7610-7611", max_workers=8)
    coordinator = Coordinator(server, state, Contents(folder / "contents"), ClusterLimits(), worker_platform=place)
    threading.Thread(target=server.serve, daemon=True).start()
    told = r"shards=3: each takes a port .*--worker-listen tcp://127.0.0.1:7610-7611` has 2; give no more"
    with RpcClient(server.address) as client:
        with pytest.raises(RemoteCallError, match=told) as refused:
            client.call("register", msgspec.structs.replace(spec("a"), shards=3, workers=3), reply_type=bool)
        assert refused.value.kind is ErrorKind.USAGE
        client.call("register", spec("a"), reply_type=bool)
        with pytest.raises(RemoteCallError, match=told):
            client.call("scale", Scale("a", 3), reply_type=FlowView)
    assert [flow.spec.shards for flow in ask_in(server, coordinator.views)[0]] == [None]


def test_what_runs_is_computed_once_a_change_for_any_number_of_nodes(tmp_path: Path) -> None:
    in_fork(assign, tmp_path)


def assign(folder: Path) -> None:
    (folder / "contents").mkdir()
    (folder / "contents" / CONTENT).touch()
    state = WriteBehindStore(lambda: open_store(str(folder / "state")), "owner")
    names, looked = "abcd", Counter[str]()
    for name in names:
        state.put(f"flow/{name}:v1", msgspec.msgpack.encode(spec(name)))
    nodes, changed = NodeTable("cluster", generations=0, lease_s=10.0), Counter[str]()
    for number in range(64):
        nodes.join(f"node{number}", "process", "127.0.0.1", 1, 0.0)

    def count(spec: FlowSpec, part: Any, processes: Sequence[ProcessView], **given: Any) -> list[Launch]:
        looked[spec.instance] += 1
        assert {view.id for view in processes} == {f"{spec.instance}/router"}, "views of other flows"
        return launches_of(spec, part, processes, **given)

    services.launches_of = count  # type: ignore[attr-defined]
    server = RpcServer(listen(f"ipc://{folder}/coordinator"))
    coordinator = Coordinator(
        server,
        state,
        Contents(folder / "contents"),
        ClusterLimits(),
        nodes=nodes,
    )
    coordinator.on_change = lambda: changed.update(["changed"])
    for times in (1, 2):
        coordinator.observe([router(name) for name in names])
        assigned = [launch for node in nodes.usable for launch in coordinator.assigned_to(node) or []]
        assert [launch.id for launch in coordinator.desired()] == [f"{name}:v1/router" for name in names]
        assert {launch.id.partition("/")[0] for launch in assigned} == {f"{name}:v1" for name in names}
        assert looked == {f"{name}:v1": times for name in names}
    coordinator.changed()
    coordinator.assigned_to("node0")
    assert looked == {f"{name}:v1": 3 for name in names}
    assert changed.total() >= 1
