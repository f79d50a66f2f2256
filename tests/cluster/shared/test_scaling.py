"""Shards and workers come and go while jobs read; there are never more workers than the cluster may have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.cluster_command import CommandedCluster
from tests.shared_cluster import wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.coordinator import FlowView, Scale
from torch_dpflow.errors import RemoteCallError, UsageError

WORKERS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandedCluster]:
    """A cluster of four workers."""
    started = CommandedCluster.up(tmp_path_factory.mktemp("c"), "--workers", str(WORKERS))
    yield started
    started.stop()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    """What jobs are forked of."""
    started = Nursery()
    yield started
    started.close()


def dpflow(cluster: CommandedCluster, *arguments: str) -> Any:
    """What a command says in JSON."""
    result = CliRunner().invoke(root, [*arguments, "--json", "--address", cluster.address])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def processes(cluster: CommandedCluster, role: str) -> list[str]:
    """Ids of the processes of a role that run: a node lists a killed one until it has reaped it."""
    return [view.id for view in cluster.processes() if view.role == role and not has_ended(view.pid)]


def processes_of(cluster: CommandedCluster, flow: str, role: str) -> list[str]:
    return [id for id in processes(cluster, role) if id.startswith(f"{flow}/")]


def test_two_jobs_read_on_while_shards_go_from_one_to_three_to_two(
    cluster: CommandedCluster, nursery: Nursery, tmp_path: Path
) -> None:
    jobs = [
        ChaosJob.start(
            nursery,
            cluster,
            tmp_path,
            flow="scaled",
            number=number,
            size=400,
            epochs=1,
            endless=True,
            ordered=number == 1,
            cost_s=0.001,
            step_s=0.03,
            workers=3,
        )
        for number in range(2)
    ]

    def all_read_on(more: int) -> None:
        before = [job.batches() for job in jobs]
        wait(
            lambda: all(job.batches() >= count + more for job, count in zip(jobs, before)),
            what="further batches",
        )

    def has_shards(count: int) -> bool:
        assert len(processes_of(cluster, "scaled:v1", "worker")) <= 3
        (flow,) = (one for one in dpflow(cluster, "top", "--count", "1")["flows"] if one["flow"] == "scaled:v1")
        if not flow["shards"] == len(processes_of(cluster, "scaled:v1", "shard")) == count:
            return False
        generations.append(flow["generation"])
        return generations[-1] > generations[-2]

    all_read_on(5)
    generations = [1]
    for shards in (3, 2):
        assert dpflow(cluster, "flow", "scale", "scaled", "--shards", str(shards))["spec"]["shards"] == shards
        if shards == 2:
            cluster.kill("coordinator")  # the next one reads off what runs that a shard is to go
        wait(lambda shards=shards: has_shards(shards), what=f"{shards} shards")
        all_read_on(10)
    (tmp_path / "enough").touch()
    for job in jobs:
        job.finish()
    wait(lambda: cluster.flows()["scaled:v1"].jobs == 0, what="the jobs' end at the coordinator")
    dpflow(cluster, "flow", "delete", "scaled")


def jittered(sample: Any) -> Any:
    values, key = sample
    return values + torch.rand(4), key


def test_what_is_drawn_by_chance_is_the_same_whatever_becomes_of_the_shards(
    cluster: CommandedCluster, join: Callable[..., SharedJob]
) -> None:
    def draws(batches: Any) -> dict[int, tuple[float, ...]]:
        return {int(key): tuple(row.tolist()) for values, keys in batches for row, key in zip(values, keys)}

    dataset = ALSDCache(Numbers(300), "64MiB", transform=jittered)
    with join("draws/still", dataset, batch_size=5, seed=3) as still:
        expected = draws(still.traverse(0))
    moved = join("draws/moved", dataset, batch_size=5, seed=3)
    reading = moved.traverse(0)
    got = draws(next(reading) for _ in range(2))
    for shards in (2, 1):
        dpflow(cluster, "flow", "scale", "draws/moved", "--shards", str(shards))
        wait(
            lambda shards=shards: len(processes_of(cluster, "draws/moved:v1", "shard")) == shards,
            what=f"{shards} shards",
        )
        got |= draws(next(reading) for _ in range(10))
        lines = [line for line in cluster.log.read_text().splitlines() if "flow=draws/moved:v1" in line]
        assert not [line for line in lines if "level=warning" in line]
        retired = [line for line in lines if "shard retired" in line]
        assert len(retired) <= (shards == 1)  # the second one may have had no keys yet
    got |= draws(reading)
    assert got == expected
    assert len(got) == 300


@pytest.mark.slow
def test_flows_share_the_workers_and_the_last_one_has_them_all(
    cluster: CommandedCluster, join: Callable[..., SharedJob]
) -> None:
    first = join("halves/a", Numbers(40), batch_size=8, workers=4)
    wait(lambda: len(processes(cluster, "worker")) == 4, what="all workers for one flow")
    second = join("halves/b", Numbers(40), batch_size=8, workers=9)

    def divided() -> bool:
        # What is started may overlap for a moment with what has been killed, and is told to be two for each.
        parts = {name: flow.part for name, flow in cluster.flows().items() if flow.part and flow.jobs}
        return {name: part.workers for name, part in parts.items()} == {"halves/a:v1": 2, "halves/b:v1": 2}

    wait(divided, what="two workers for each flow")
    for job in (first, second):
        assert sorted(int(key) for _, keys in job.traverse(0) for key in keys) == list(range(40))
    first.close()
    wait(lambda: cluster.flows()["halves/a:v1"].state == "idle", what="the first flow's idleness")
    wait(
        lambda: len(processes_of(cluster, "halves/b:v1", "worker")) == 4,
        what="all workers for the other flow",
    )
    assert len(processes(cluster, "worker")) == 4
    assert sorted(int(key) for _, keys in second.traverse(1) for key in keys) == list(range(40))


def test_flows_without_jobs_give_their_workers_to_others_and_get_them_back(
    cluster: CommandedCluster, join: Callable[..., SharedJob]
) -> None:
    for name in "ab":
        with join(f"left/{name}", Numbers(10), workers=1, idle_s=600.0) as left:
            assert len(list(left.traverse(0))) == 10
    busy = join("left/busy", Numbers(100), workers=WORKERS)
    wait(lambda: len(processes_of(cluster, "left/busy:v1", "worker")) == WORKERS, what="all workers for its flow")
    assert sorted(int(key) for _, keys in busy.traverse(0) for key in keys) == list(range(100))
    assert cluster.flows()["left/a:v1"].state == "ready", "its services run"
    with join("left/a", Numbers(10), workers=1) as back:
        assert sorted(int(key) for _, keys in back.traverse(1) for key in keys) == list(range(10))
    wait(lambda: cluster.flows()["left/a:v1"].state == "ready", what="that its job has left")
    for name in "ab":
        dpflow(cluster, "flow", "delete", f"left/{name}")


def test_a_flow_for_which_there_is_no_worker_is_told_so(
    cluster: CommandedCluster, join: Callable[..., SharedJob]
) -> None:
    wait(lambda: not processes(cluster, "router"), what="the end of other flows' services")
    jobs = [join(f"many/{number}", Numbers(10), workers=1) for number in range(WORKERS)]
    with pytest.raises(UsageError, match=r"4 flows take all workers, memory or ports of the cluster.*waited 1 s"):
        join("many/more", Numbers(10), reconnect_timeout_s=1.0)
    for job in jobs:
        assert len(list(job.traverse(0))) == 10


def test_what_cannot_be_scaled_is_said(cluster: CommandedCluster, join: Callable[..., SharedJob]) -> None:
    with cluster.coordinator() as client:
        with pytest.raises(RemoteCallError, match="'none' is not registered"):
            client.call("scale", Scale("none", 2))
        for wrong in (Scale("none", 5), Scale("none", 1, 5)):
            with pytest.raises(RemoteCallError, match="=5: the cluster has 4 workers"):
                client.call("scale", wrong)
        wait(lambda: not any(flow.jobs for flow in cluster.flows().values()), what="the end of other jobs")
        wait(lambda: not processes(cluster, "router"), what="the end of other flows' services")
        join("fixed", Numbers(2))
        with pytest.raises(RemoteCallError, match="shards=3 is out of range; give an int from 1 to 2"):
            client.call("scale", Scale("fixed", 3))
        scaled: FlowView = client.call("scale", Scale("fixed", 1, 4), reply_type=FlowView).body
        assert scaled.part is not None
        assert (scaled.spec.workers, scaled.part.workers) == (4, 4)


@pytest.mark.slow
def test_loaders_that_take_turns_share_a_cluster_with_room_for_fewer(flow: str, tmp_path: Path) -> None:
    """As those for training, validation and test: one that is not being iterated makes room for another."""
    cluster = CommandedCluster.up(tmp_path, "--workers", "2")
    try:
        loaders = [
            DPFlowDataLoader(
                Numbers(20),
                batch_size=4,
                num_workers=1,
                flow=f"{flow}/{part}",
                address=cluster.address,
                job=JobOptions(),
            )
            for part in ("train", "validation", "test")
        ]
        for loader in (*loaders, loaders[0]):
            assert [int(key) for _, keys in loader for key in keys] == list(range(20))
        states = {name: view.state for name, view in cluster.flows().items()}
        assert "idle" in states.values(), "one gave way"
    finally:
        cluster.stop()
