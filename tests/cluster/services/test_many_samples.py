"""No step of a flow's services grows with the number of samples, and a busy shard is not taken for dead.

What is counted is work: memory that a step allocates, and places of permutations that it draws. Time is not.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torch_dpflow._core import permutation
from torch_dpflow.caches import make_policy
from torch_dpflow.cluster.control import lookaheads
from torch_dpflow.cluster.control.joint_order import Held, JointOrder
from torch_dpflow.cluster.control.lookaheads import LookaheadParts, ShardLookaheads
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import (
    DrawSamples,
    EpochPlace,
    JobHeartbeat,
    JobHeartbeatReply,
    JobId,
    JobLookahead,
    JobRank,
    Join,
    Joined,
    LookaheadRequest,
    RangeAssignment,
    RegisterShard,
    RouterSettings,
    StartEpoch,
)
from torch_dpflow.cluster.messages.shard import ShardSettings
from torch_dpflow.cluster.services import router as router_module
from torch_dpflow.cluster.services import router_jobs
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.cluster.services.service import ClusterPlace
from torch_dpflow.cluster.shard import run as shard_run
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import ErrorKind, RemoteCallError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient, RpcServer
from torch_dpflow.ipc.transport import listen
from torch_dpflow.samplers import sampling_group

FEW, MANY = 100_000, 4_800_000
HORIZON = 2_000
SHARD = "shard"


@pytest.fixture(autouse=True)
def _near_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lookaheads, router_module):
        monkeypatch.setattr(module, "MAX_WHOLE", 10 * HORIZON)
        monkeypatch.setattr(module, "HORIZON", HORIZON)
    monkeypatch.setattr(lookaheads, "FIRST_HORIZON", HORIZON // 8)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    original = permutation.Permutation._targets

    def counted(self: Any, left: Any) -> Any:
        counts.append(len(left))
        return original(self, left)

    monkeypatch.setattr(permutation.Permutation, "_targets", counted)
    return counts


@contextmanager
def serving(server: RpcServer) -> Iterator[RpcServer]:
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()


def peak_of(step: Callable[[], Any]) -> int:
    """Return the bytes that a step had allocated at once."""
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def spec_of(size: int, strategy: str) -> FlowSpec:
    return FlowSpec(name="f", version=1, size=size, content="a" * 64, fingerprint={}, strategy=strategy)


class Job:
    """A job that speaks to a router."""

    def __init__(
        self, client: RpcClient, spec: FlowSpec, name: str, part: Any = None, rank: JobRank | None = None
    ) -> None:
        self.client, self.spec, self.position = client, spec, 0
        frames = [] if part is None else [np.array(part, np.int64).tobytes()]
        join = Join(name, spec.instance, hash(name) & 0xFFFF, 0, 4, rank, part is not None)
        joined = client.call("join", join, frames, reply_type=Joined)
        self.id = JobId(name, joined.body.generation, spec.instance, "" if rank is None else rank.job)

    def start(self, epoch: int) -> None:
        self.position = 0
        self.client.call("start", StartEpoch(self.id, [EpochPlace(epoch, 0, False)], True), [b""])

    def draw(self, epoch: int, count: int) -> list[int]:
        answer = self.client.call("draw", DrawSamples(self.id, epoch, self.position, count))
        self.position += count
        numbers: list[int] = np.frombuffer(answer.frames[0], np.int64).tolist()
        return numbers

    def lookahead(self) -> tuple[JobLookahead, LookaheadParts | None]:
        request = LookaheadRequest(self.spec.instance, self.id.name, 0, self.spec.size, 0, HORIZON)
        answer = self.client.call("lookahead", request, reply_type=JobLookahead)
        return answer.body, LookaheadParts.of(answer.frames, self.spec.size)


@contextmanager
def routed(folder: Path, size: int, strategy: str) -> Iterator[tuple[RpcClient, FlowSpec]]:
    """A router with one shard."""
    spec = spec_of(size, strategy)
    server = RpcServer(listen(f"ipc://{folder}/router-{size}"))
    Router(server, spec, RouterSettings([SHARD]), token="t", incarnation=1)
    with serving(server), RpcClient(server.address, options=ClientOptions(timeout_s=150.0, shared_bytes=0)) as client:
        client.call("register_shard", RegisterShard(SHARD, 1, "ipc:///shard", "t"), reply_type=RangeAssignment)
        yield client, spec


def peaks_of_router(folder: Path, size: int, strategy: str, jobs: int, drawn: list[int]) -> dict[str, int]:
    """Return the bytes that each of a router's steps had allocated at once."""
    with routed(folder, size, strategy) as (client, spec):
        readers = [Job(client, spec, f"job-{number}") for number in range(jobs)]
        drawn.clear()
        for reader in readers:
            reader.start(0)
        first = readers[0]
        assert len({*first.draw(0, 256)}) == 256
        lookahead, parts = first.lookahead()
        assert parts is not None
        assert (lookahead.is_complete, lookahead.has_members, lookahead.has_following) == (False, False, False)
        assert len(parts.certain) <= 256 + HORIZON
        assert sum(drawn) <= jobs * 2 * permutation._PIECE
        heartbeat = JobHeartbeat(first.id, None, True)
        return {
            "draw": peak_of(lambda: first.draw(0, 256)),
            "lookahead": peak_of(first.lookahead),
            "heartbeat": peak_of(lambda: client.call("heartbeat", heartbeat, reply_type=JobHeartbeatReply)),
            "next epoch": peak_of(lambda: first.start(1)),
            "its first draw": peak_of(lambda: first.draw(1, 256)),
        }


def peaks_with_part(folder: Path, size: int, strategy: str) -> dict[str, int]:
    """Return the bytes that each of a router's steps had allocated at once, for a job that reads every second sample.

    Its join and the start of its epoch pass over the samples, in a thread.
    """
    with routed(folder, size, strategy) as (client, spec):
        job = Job(client, spec, "job", np.arange(0, size, 2))
        job.start(0)
        drawn = job.draw(0, 256)
        assert len({*drawn}) == 256
        assert not any(key % 2 for key in drawn)
        answer, parts = job.lookahead()
        assert parts is not None
        assert (answer.has_members, len(parts.certain)) == (False, 256 + HORIZON)
        following = parts.certain[256:512].tolist()
        assert job.draw(0, 256) == following
        return {
            "draw": peak_of(lambda: job.draw(0, 256)),
            "lookahead": peak_of(job.lookahead),
            "leave": peak_of(lambda: client.call("leave", job.id)),
        }


def peaks_of_shard(folder: Path, size: int) -> dict[str, int]:
    """Return the bytes that each of the steps of a shard's cache policy had allocated at once."""
    with routed(folder, size, "independent") as (client, spec):
        job = Job(client, spec, "job")
        job.start(0)
        keys = job.draw(0, 256)
        answer, parts = job.lookahead()
        assert parts is not None
        shard, policy = ShardLookaheads(spec.instance, size), make_policy("alsd", max_bytes=10_000, keys=size)
        policy.join("job")
        shard.wanted("job", "job", 0, keys)
        (request,) = shard.requests()

        def hint() -> None:
            found = shard.answered(request, answer, parts)
            assert found is not None
            assert found.position == 256
            assert len(found.certain) == HORIZON
            policy.hint("job", found)

        return {
            "a new epoch": peak_of(hint),
            "reads": peak_of(lambda: policy.access_many(np.array(keys), "job")),
        }


def check(few: dict[str, int], many: dict[str, int]) -> None:
    for step, peak in few.items():
        assert many[step] <= 2 * peak + 200_000 < MANY, step


@pytest.mark.parametrize("strategy", ["shared-log", "independent"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_routers_steps_do_not_grow_with_the_flow(tmp_path: Path, drawn: list[int], strategy: str, jobs: int) -> None:
    check(*(peaks_of_router(tmp_path, size, strategy, jobs, drawn) for size in (FEW, MANY)))


@pytest.mark.parametrize("strategy", ["shared-log", "independent", "coordl"])
def test_steps_for_a_part_do_not_grow_with_the_flow(tmp_path: Path, strategy: str) -> None:
    check(*(peaks_with_part(tmp_path, size, strategy) for size in (FEW, MANY)))


def test_what_passes_over_the_samples_does_so_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    begin, add = JointOrder.start, router_jobs.new_job

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return original(*args, **given)

        return run

    monkeypatch.setattr(JointOrder, "start", noted(begin))
    monkeypatch.setattr(router_jobs, "new_job", noted(add))
    apart = "dpflow-restore"
    with routed(tmp_path, FEW, "shared-log") as (client, spec):
        whole = Job(client, spec, "whole")
        whole.start(0)
        assert apart not in threads
        part = Job(client, spec, "part", range(0, FEW, 2))
        assert threads.pop() == apart
        part.start(0)
        assert threads.pop() == apart
        ranks = [Job(client, spec, f"rank-{rank}", rank=JobRank("ranks", rank, 2, False)) for rank in range(2)]
        for rank in ranks:
            rank.start(0)
        threads.clear()
        ranks[0].start(1)  # draws the rest of the epoch for the other rank
        assert threads == [apart]
        assert sum(len(ranks[1].draw(0, 16_000)) for _ in range(4)) == FEW // 2
        with pytest.raises(RemoteCallError, match=r"indices has 100000.*0 to 99999 are"):
            Job(client, spec, "wrong", [FEW])
        Job(client, spec, "wrong", [1])  # the name is free again


def test_a_router_answers_heartbeats_while_a_job_with_a_part_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining, released, add = threading.Event(), threading.Event(), router_jobs.new_job

    def slow(group: Any, join: Join, rank: JobRank, indices: Any, members: bytes) -> Any:
        if indices is not None:
            joining.set()
            released.wait()
        return add(group, join, rank, indices, members)

    monkeypatch.setattr(router_jobs, "new_job", slow)
    with routed(tmp_path, FEW, "shared-log") as (client, spec):
        first = Job(client, spec, "first")
        first.start(0)
        part = np.arange(0, FEW, 2)
        try:
            join = Join("part", spec.instance, 7, 0, 4, None, True)
            pending = client.begin("join", join, [part.tobytes()], reply_type=Joined)
            assert joining.wait(150)
            client.call("register_shard", RegisterShard(SHARD, 1, "ipc:///shard", "t", 9), reply_type=RangeAssignment)
            client.call("heartbeat", JobHeartbeat(first.id, None, True), reply_type=JobHeartbeatReply)
            for refused in (lambda: first.draw(0, 8), lambda: Job(client, spec, "other")):
                with pytest.raises(RemoteCallError, match="adds one") as caught:
                    refused()
                assert caught.value.kind is ErrorKind.OVERLOADED
        finally:
            released.set()
        assert pending.result().body.length == FEW // 2
        assert len(first.draw(0, 8)) == 8


def test_a_shards_steps_do_not_grow_with_the_flow(tmp_path: Path) -> None:
    check(*(peaks_of_shard(tmp_path, size) for size in (FEW, MANY)))


def test_a_router_answers_heartbeats_while_it_restores_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restoring, released = threading.Event(), threading.Event()
    original = JointOrder.start

    def slow(self: JointOrder, rank: int, held: list[Held], **given: Any) -> None:
        if len(held[0].samples):
            restoring.set()
            released.wait()
        original(self, rank, held, **given)

    monkeypatch.setattr(JointOrder, "start", slow)
    with routed(tmp_path, FEW, "shared-log") as (client, spec):
        first, second = (Job(client, spec, name) for name in ("first", "second"))
        first.start(0)
        marks = np.zeros(-(-FEW // 8), np.uint8)
        marks[:2] = 255
        start = StartEpoch(second.id, [EpochPlace(0, 16, False)], False)
        try:
            pending = client.begin("start", start, [marks.tobytes()])
            assert restoring.wait(timeout=150)
            client.call("register_shard", RegisterShard(SHARD, 1, "ipc:///shard", "t", 9), reply_type=RangeAssignment)
            client.call("heartbeat", JobHeartbeat(second.id, None, True), reply_type=JobHeartbeatReply)
            for refused in (lambda: first.draw(0, 8), first.lookahead, lambda: first.start(1)):
                with pytest.raises(RemoteCallError, match="restores") as caught:
                    refused()
                assert caught.value.kind is ErrorKind.OVERLOADED
        finally:
            released.set()
        pending.result()
        assert len(first.draw(0, 8)) == 8
        second.position = 16
        drawn = second.draw(0, 8000)
        assert len({*drawn}) == 8000
        assert min(drawn) >= 16
        with pytest.raises(RemoteCallError, match="epoch"):  # an error of the thread reaches its caller
            client.call("start", StartEpoch(second.id, [EpochPlace(0, FEW + 1, False)], False), [marks.tobytes()])
        assert len(first.draw(0, 8)) == 8


def test_an_order_of_more_samples_than_torch_shuffles_in_place_is_drawn_as_it_is_read(drawn: list[int]) -> None:
    group = sampling_group("independent", permutation.MAX_TORCH + 1)
    group.join("job", seed=3)
    group.start_epoch("job", 0)
    assert len({*group.next("job", 1000).tolist()}) == 1000
    assert sum(drawn) <= permutation._PIECE


def test_a_shard_whose_thread_is_busy_keeps_registering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = threading.Semaphore(0)
    server = RpcServer(listen(f"ipc://{tmp_path}/router"))

    def on_register(call: Any) -> Any:
        registered.release()
        return RangeAssignment(1, 0, FEW)

    server.register("register_shard", on_register, body_type=RegisterShard)
    monkeypatch.setattr("torch_dpflow.cluster.services.service.locate", lambda *_, **__: server.address)
    monkeypatch.setattr(shard_run, "REGISTER_S", 0.01)
    place = ClusterPlace(directory=str(tmp_path))
    spec = spec_of(FEW, "shared-log")
    shard = SampleShard(
        listen(f"ipc://{tmp_path}/shard"), spec, ShardSettings(1, 1 << 20), token="t", end_worker=lambda *_: None
    )
    service: Any = SimpleNamespace(place=place, id=SHARD, incarnation=1)
    released, is_busy = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        released.wait()

    with serving(server), serving(shard.server):
        calls = shard_run.RouterCalls(service, shard, "router")
        lookahead_calls = shard_run.LookaheadCalls(service, shard, "router")
        try:
            shard.server.post(be_busy)
            is_busy.wait()
            lookahead_calls.thread.wake()  # waits for the shard's thread
            for _ in range(5):
                assert registered.acquire(timeout=150)
        finally:
            released.set()
            for thread in (calls.thread, lookahead_calls.thread):
                thread.stop()
                thread.join()
