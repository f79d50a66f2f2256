"""Runs with several numbers of ranks read one epoch of a flow, one after another, from the states of those before."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.cluster.client.open_job import Replica, SharedJob
from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.errors import StateError, UsageError
from torch_dpflow.loader.loaded_state import join_flow_states

Join = Callable[..., SharedJob]
SIZE = 200


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


class Run:
    """All ranks of a run, in this process; they begin or resume epoch 2."""

    def __init__(self, join: Join, flow: str, count: int, state: dict[str, Any] | None, **given: Any) -> None:
        self.jobs = [
            join(flow, Numbers(SIZE), name="job", replica=replica, **{"batch_size": 4, **given})
            for replica in ([None] if count == 1 else [Replica(rank=rank, num_replicas=count) for rank in range(count)])
        ]
        self.readings = [job.traverse(2, done=state) for job in self.jobs]

    def read(self, steps: Sequence[int]) -> list[int]:
        """What the ranks read in so many batches each."""
        return keys(next(reading) for reading, count in zip(self.readings, steps, strict=True) for _ in range(count))

    def finish(self) -> list[int]:
        """What the ranks read until the epoch's end."""
        parts: list[list[int]] = [[] for _ in self.readings]

        def read(rank: int) -> None:
            parts[rank] += keys(self.readings[rank])

        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [*chain.from_iterable(parts)]

    def state(self, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(json.dumps(self.jobs[rank].state()))
        return state

    def joined(self) -> dict[str, Any]:
        states = [LoaderState(fresh=False, base_seed=0, shared=self.state(rank)) for rank in range(len(self.jobs))]
        shared = join_flow_states(states, 0).shared
        assert shared is not None
        return shared

    def close(self) -> None:
        for job in self.jobs:
            job.close()


def test_8_3_5_and_1_ranks_read_an_epoch_together_beside_another_job(join: Join, flow: str) -> None:
    other = join(flow, Numbers(SIZE), batch_size=4, seed=9)
    reading = other.traverse(0)
    others, read = keys(next(reading) for _ in range(5)), []
    state: dict[str, Any] | None = None
    for count, batch_size in ((8, 4), (3, 5), (5, 2)):
        run = Run(join, flow, count, state, batch_size=batch_size)
        read += run.read([2] * count)
        others += keys(next(reading) for _ in range(5))
        state = run.state(count // 2)
        run.close()
    last = Run(join, flow, 1, state)
    assert sorted(read + last.finish()) == list(range(SIZE))
    assert sorted(others + keys(reading)) == list(range(SIZE))
    assert sorted(keys(last.jobs[0].traverse(3))) == list(range(SIZE))


def test_states_alone_suffice_where_ranks_were_out_of_step_and_the_router_is_another(join: Join, flow: str) -> None:
    run = Run(join, flow, 3, None)
    read = run.read([5, 0, 2])
    state = run.joined()
    run.close()
    again = Run(join, f"{flow}/again", 4, state)
    rest = again.finish()
    # 172 samples are left, which divide evenly.
    assert sorted(read + rest) == list(range(SIZE))


def test_a_state_says_what_all_ranks_read_once_its_router_is_back(join: Join, cluster: TestCluster, flow: str) -> None:
    run = Run(join, flow, 2, None)
    read = run.read([3, 3])
    cluster.kill(f"{flow}:v1/router")
    read += run.read([1, 1])
    # Both have drawn ahead by then, and the new router has heard how far, but not in which order.
    states: list[dict[str, Any]] = []

    def knows() -> bool:
        read.extend(run.read([1, 1]))
        states.append(run.state(1))
        return states[-1]["together"] is not None

    wait(knows, what="a position of all ranks")
    for early in states[:-1]:
        with pytest.raises(StateError, match=r"samples of rank 1 of 2 only.*the states of all 2 ranks as a list"):
            join(f"{flow}/again", Numbers(SIZE)).traverse(2, done=early)
    run.close()
    assert sorted(set(read + Run(join, flow, 3, states[-1]).finish())) == list(range(SIZE))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("of_all", [True, False])
def test_loaders_of_ranks_resume_with_other_ranks_batches_and_workers(
    cluster: TestCluster, flow: str, shuffle: bool, of_all: bool
) -> None:
    """Whether the flow's router orders the samples or the sampler."""

    def make(run: int, count: int, batch_size: int, workers: int) -> list[DPFlowDataLoader[Any]]:
        return [
            DPFlowDataLoader(
                Numbers(SIZE),
                batch_size=batch_size,
                sampler=DistributedSampler(Numbers(SIZE), count, rank, shuffle=shuffle, seed=3),
                num_workers=workers,
                flow=flow,
                address=cluster.address,
                job=JobOptions(name=f"{flow}/{run}", idle_s=3.0),
            )
            for rank in range(count)
        ]

    read: list[int] = []
    states: list[dict[str, Any]] = []
    for run, sizes in enumerate([(4, 5, 2), (2, 9, 1), (3, 4, 2)]):
        loaders = make(run, *sizes)
        for loader in loaders:
            loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
            if states:
                loader.load_state_dict(states if of_all else states[len(states) // 2])
        if run < 2:
            batches = [iter(loader) for loader in loaders]
            read += keys(next(batch) for _ in range(2) for batch in batches)
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    # Of 124 samples for three ranks, two are read twice.
    parts = [keys(batches) for batches in zip(*loaders, strict=True)]
    rest = [*chain.from_iterable(parts)]
    assert (len(rest), {*read, *rest}, len({*read})) == (126, {*range(SIZE)}, 76)
    for loader in loaders:
        loader.sampler.set_epoch(6)  # type: ignore[attr-defined]
    epochs = [*chain.from_iterable(keys(batches) for batches in zip(*loaders, strict=True))]
    assert (len(epochs), {*epochs}) == (201, {*range(SIZE)})


#: The ranks of a run, which is killed once it has read.
KILLED = """
import json, sys
from tests.cluster.shared.test_shared_resize import SIZE, Run
from tests.shared_cluster import open_job
from torch_dpflow.cluster.client.open_job import JobOptions
address, flow = sys.argv[1:]
def join(flow, dataset, name, **given):
    return open_job(flow, dataset, address=address, options=JobOptions(name=name, idle_s=3.0), **given)
run = Run(join, flow, 3, None)
print(json.dumps([run.read([2, 2, 2]), run.state(1)]), flush=True)
sys.stdin.readline()
"""


def test_fewer_ranks_take_over_the_name_of_a_run_of_their_host_that_was_killed(
    join: Join, cluster: TestCluster, flow: str
) -> None:
    with interpreter(KILLED, cluster.address, flow, stdin=-1) as former:
        assert former.stdout is not None
        read, state = json.loads(former.stdout.readline())
        with pytest.raises(UsageError, match="num_replicas=4, other ranks have 3"):
            join(flow, Numbers(SIZE), name="job", batch_size=4, replica=Replica(rank=3, num_replicas=4))
        former.kill()
    assert sorted(read + Run(join, flow, 2, state).finish()) == list(range(SIZE))
    ends = [line for line in cluster.log.read_text().splitlines() if "lease expired" in line and "job/" in line]
    assert not ends, "it has waited for the leases"
