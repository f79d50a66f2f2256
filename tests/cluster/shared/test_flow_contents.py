"""What a flow's workers load travels in pieces, once to a host, and no service holds it in memory."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cluster.client import flow_registration
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.coordinator import ContentPiece, ContentRequest, FlowSpec, Scale
from torch_dpflow.cluster.messages.node import ProcessView, Running
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.cluster.services import contents
from torch_dpflow.cluster.services.contents import ContentFiles, open_content
from torch_dpflow.cluster.services.service import ClusterPlace
from torch_dpflow.errors import DPFlowError, OptionError, RemoteCallError, StateError, UsageError
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcClient, RpcServer
from torch_dpflow.ipc.transport import listen

Join = Callable[..., SharedJob]


@pytest.fixture(scope="module")
def cluster(cluster_of_file: TestCluster) -> TestCluster:
    return cluster_of_file


class InMemory(Numbers):
    """Sample `i` is a byte of what the dataset holds, and `i`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(64)
        self.held = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)

    def __getitem__(self, index: int) -> Any:
        return self.held[index * len(self.held) // 64], index


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def peaks(cluster: TestCluster, flow: str) -> dict[str, int]:
    found = {view.role: view.pid for view in cluster.processes() if view.id.startswith(("coord", f"{flow}:v1/s"))}
    return {role: peak_bytes(found[role]) for role in ("coordinator", "shard")}


@pytest.mark.parametrize(("nbytes", "workers"), [(64 << 20, 2), pytest.param(400 << 20, 4, marks=pytest.mark.slow)])
def test_a_dataset_that_holds_much_is_in_no_services_memory(
    cluster: TestCluster, join: Join, flow: str, nbytes: int, workers: int
) -> None:
    small = join(f"{flow}/small", InMemory(64), batch_size=64)
    assert len(list(small.traverse(0))) == 1
    before = peaks(cluster, f"{flow}/small")
    dataset = InMemory(nbytes)
    ((values, keys),) = join(flow, dataset, batch_size=64, workers=workers, idle_s=60.0).traverse(0)
    assert [int(value) for value in values] == [dataset[int(key)][0] for key in keys]
    wait(lambda: len(cluster.processes(f"{flow}:v1/shard-000/worker")) == workers, what="all workers")
    after = peaks(cluster, flow)
    for role in before:
        assert after[role] - before[role] < 32 << 20, role
    folder = Path(find_cluster(cluster.address).address.removeprefix("ipc://")).parent
    held = [path for path in (folder / "contents").iterdir() if path.stat().st_size > nbytes]
    assert len(held) == 1, "one copy for all workers of a host"


def test_what_is_too_large_is_told_before_anything_is_sent(
    join: Join, flow: str, cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_registration, "MAX_CONTENT_BYTES", 1 << 20)
    with pytest.raises(OptionError, match=r"take 2,\d+,\d+ bytes when they are packed; 1,048,576 are allowed"):
        join(flow, InMemory(2 << 20))
    assert f"{flow}:v1" not in cluster.flows()


def registered(client: RpcClient, flow: str, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    spec = FlowSpec(name=flow, version=1, size=10, content=digest, fingerprint={})
    assert client.call("register", spec, reply_type=bool).body is False
    return digest


def test_pieces_come_from_several_and_through_the_death_of_the_coordinator(cluster: TestCluster, flow: str) -> None:
    content = os.urandom(10_000)

    def store(client: RpcClient, begin: int, end: int) -> int:
        piece = ContentPiece(digest, begin, len(content))
        held: int = client.call("store", piece, [content[begin:end]], reply_type=int).body
        return held

    with cluster.coordinator() as client:
        digest = registered(client, flow, content)
        client.call("scale", Scale(flow, 1))  # answered once the state is written, unlike a registration
        assert store(client, 0, 4000) == 4000
        assert store(client, 0, 3000) == 4000, "another brings the same, and is told where to go on"
        assert store(client, 5000, 6000) == 4000, "a piece is missing"
        killed = cluster.kill("coordinator")
        wait(lambda: has_ended(killed), what="the coordinator's end")
        assert store(client, 4000, 8000) == 0, "from the beginning"
        assert [store(client, begin, begin + 5000) for begin in (0, 5000, 0)] == [5000, 10_000, 10_000]
        answer = client.call("content", ContentRequest(digest, 2500), reply_type=int)
        assert (answer.body, bytes(answer.frames[0])) == (10_000, content[2500:])
        client.call("delete", f"{flow}:v1")
        with pytest.raises(DPFlowError, match="no content"):
            client.call("content", ContentRequest(digest, 0))


def test_a_content_that_one_flow_has_announced_and_not_taken_is_stored_for_another(
    cluster: TestCluster, flow: str
) -> None:
    taken, announced = os.urandom(100), os.urandom(100)
    with cluster.coordinator() as client:

        def store(content: bytes) -> str:
            digest = hashlib.sha256(content).hexdigest()
            assert client.call("store", ContentPiece(digest, 0, 100), [content], reply_type=int).body == 100
            return digest

        registered(client, f"{flow}/one", taken)
        store(taken)
        digest = registered(client, f"{flow}/other", announced)
        again = FlowSpec(name=f"{flow}/one", version=1, size=10, content=digest, fingerprint={})
        assert client.call("register", again, reply_type=bool).body is True
        store(announced)
        assert client.call("content", ContentRequest(digest, 0), reply_type=int).body == 100
        for name in ("one", "other"):
            client.call("delete", f"{flow}/{name}:v1")


def test_what_came_is_kept_whole_and_under_its_own_digest_only(tmp_path: Path) -> None:
    content = os.urandom(1000)
    digest = hashlib.sha256(content).hexdigest()
    files = ContentFiles(tmp_path / "contents")
    for wrong in (bytes(1000), content + b"x"):
        with pytest.raises(UsageError, match=f"is not {digest}"):
            files.receive(ContentPiece(digest, 0, 1000), memoryview(wrong))
    assert not files.digests
    (tmp_path / "contents" / f"{digest}.part").write_bytes(content[:600])
    files = ContentFiles(tmp_path / "contents")
    assert not list((tmp_path / "contents").iterdir()), "what is left of a process that died half-way goes"
    assert files.receive(ContentPiece(digest, 0, 1000), memoryview(content)) == 1000
    assert ContentFiles(tmp_path / "contents").digests == {digest}
    files.drop(digest)
    assert not ContentFiles(tmp_path / "contents").digests
    (tmp_path / "contents").rmdir()
    with pytest.raises(StateError, match=r"cannot be stored in .*contents': No such file or directory"):
        files.receive(ContentPiece(digest, 0, 1000), memoryview(content))


def test_what_a_full_disk_has_taken_in_part_is_not_taken_for_whole(tmp_path: Path) -> None:
    content = os.urandom(1000)
    digest = hashlib.sha256(content).hexdigest()
    files = ContentFiles(tmp_path / "contents")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))  # as on a full disk, a write may be a short one
    try:
        with pytest.raises(StateError, match="free space there"):
            files.receive(ContentPiece(digest, 0, 1000), memoryview(content))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files.receive(ContentPiece(digest, 0, 1000), memoryview(content)) == 1000
    assert files.read(ContentRequest(digest, 0)) == (1000, content)


def test_what_cannot_be_stored_is_told_without_a_traceback(cluster: TestCluster, join: Join, flow: str) -> None:
    folder = Path(find_cluster(cluster.address).address.removeprefix("ipc://")).parent / "state.contents"
    wait(folder.exists, what="the coordinator's directory")
    away = folder.rename(folder.with_name("away"))
    try:
        with pytest.raises(
            RemoteCallError, match=r"contents of flows cannot be stored in .*with another TMPDIR"
        ) as caught:
            join(flow, Numbers(8))
    finally:
        away.rename(folder)
    assert "Traceback" not in str(caught.value)


def test_a_host_fetches_a_content_once_and_gives_up_where_none_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "POLL_S", 0.05)
    content, place, asked, waited = os.urandom(10_000), ClusterPlace(directory=str(tmp_path)), [], []
    digest = hashlib.sha256(content).hexdigest()
    server = RpcServer(listen(place.node_address))
    coordinator = ProcessView("coordinator", "coordinator", 1, os.getpid(), server.address, {})

    def give(call: IncomingCall) -> Result:
        if not waited:
            raise UsageError("no such content is stored")
        wait(lambda: len(waited) > 1, what="those for whom another fetches it")
        asked.append(call.body.offset)
        begin = call.body.offset
        return Result(len(content), [content[begin : begin + 5000]])

    def fetch() -> None:
        with open_content(place, digest, lambda: waited.append(1), coordinator="coordinator") as file:
            fetched.append(file.read())

    server.register("changes", lambda call: Result(Running(1, [coordinator])), body_type=int)
    server.register("content", give, body_type=ContentRequest)
    serving = threading.Thread(target=server.serve)
    serving.start()
    fetched: list[bytes] = []
    try:
        with monkeypatch.context() as hasty:
            hasty.setattr(contents, "FETCH_S", 0.3)
            with pytest.raises(DPFlowError, match="no such content"):
                open_content(place, digest, lambda: None, coordinator="coordinator")
        waited.append(0)
        fetching = [threading.Thread(target=fetch) for _ in range(3)]
        for thread in fetching:
            thread.start()
        for thread in fetching:
            thread.join()
    finally:
        server.stop()
        serving.join()
        server.close()
    assert fetched == [content] * 3
    assert asked == [0, 5000]
    assert [path.name for path in (tmp_path / "contents").iterdir()] == [digest]
