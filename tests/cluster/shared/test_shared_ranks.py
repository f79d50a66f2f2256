"""A DDP job over a shared flow: its ranks read disjoint parts of one order, whatever becomes of router and ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler, JobOptions
from torch_dpflow.cluster.client.open_job import Replica, SharedJob
from torch_dpflow.errors import OptionError, UsageError

Join = Callable[..., SharedJob]
SIZE = 101

#: Two ranks, of one process that imports for both; each writes what it reads in each of two epochs, by either sampler.
PROGRAM = """
import json, os, sys
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler, JobOptions
given = json.loads(sys.argv[1])
other = os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method="file://" + given["meet"], rank=rank, world_size=2)
dataset, epochs = Numbers(given["size"]), []
for kind in (DistributedSampler, DynaGCSSampler):
    sampler = kind(dataset, seed=3)
    loader = DPFlowDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, flow=given["flow"],
                              address=given["address"], job=JobOptions(idle_s=3.0))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([int(key) for _, labels in loader for key in labels])
        assert len(epochs[-1]) == len(sampler)
dist.barrier()
os.write(1, (json.dumps([rank, epochs]) + "\\n").encode())  # whole, beside the other's
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


#: Two peers that are to read the same; each makes the same loaders, by torch's class and by ours over a flow.
PEERS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache, DPFlowDataLoader, DynaGCSSampler, JobOptions
given = json.loads(sys.argv[1])
other = os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method="file://" + given["meet"], rank=rank, world_size=2)
seeded = lambda: torch.Generator().manual_seed(4)
dataset = ALSDCache(Numbers(given["size"]), "1MiB", transform=lambda sample: (sample[1], torch.rand(())))
makes = [
    lambda: {"shuffle": True},
    lambda: {"shuffle": True, "generator": seeded()},
    lambda: {"sampler": RandomSampler(dataset, generator=seeded())},
    lambda: {"sampler": DistributedSampler(dataset, num_replicas=1, rank=0, seed=4)},
    lambda: {"sampler": DynaGCSSampler(dataset, num_replicas=1, rank=0, seed=4)},
]
read = []
for number, make in enumerate(makes):
    def epochs(loader):
        torch.manual_seed(7)
        return [[[keys.tolist(), drawn.tolist()] for keys, drawn in loader] for _ in range(2)]
    job = JobOptions(idle_s=3.0, name="peers" if number % 2 else None)
    ours = epochs(DPFlowDataLoader(dataset, batch_size=8, num_workers=2, flow=given["flow"],
                                   address=given["address"], job=job, **make()))
    plain = DataLoader([(key, torch.zeros(())) for key in range(given["size"])], batch_size=8, **make())
    theirs = epochs(plain)
    assert [[keys for keys, _ in epoch] for epoch in ours] == [[keys for keys, _ in epoch] for epoch in theirs]
    read.append(ours)
dist.barrier()
os.write(1, (json.dumps(read) + "\\n").encode())  # whole, beside the other's
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


#: Four ranks of a mesh of two dimensions, which read a flow by the samplers of its first one.
MESH = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler, JobOptions, MixtureSampler
given = json.loads(sys.argv[1])
rank, others = 0, []
for number in (1, 2, 3):
    others.append(os.fork())
    if not others[-1]:
        rank, others = number, []
        break
dist.init_process_group("gloo", init_method="file://" + given["meet"], rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dataset, read = Numbers(given["size"]), []
for sampler in (DynaGCSSampler(dataset, ranks=mesh["dp"], seed=3), MixtureSampler([10, 14], [5, 7], ranks=mesh["dp"])):
    loader = DPFlowDataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, flow=given["flow"],
                              address=given["address"], job=JobOptions(idle_s=3.0))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        read.append([int(key) for _, labels in loader for key in labels])
dist.barrier()
os.write(1, (json.dumps([mesh.get_coordinate(), read]) + "\\n").encode())  # whole, beside the others'
dist.destroy_process_group()
if any(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others):
    sys.exit("a rank has failed")
"""


def test_peers_along_a_mesh_read_the_same_and_others_disjoint_samples(
    cluster: TestCluster, flow: str, tmp_path: Path
) -> None:
    given = {"meet": str(tmp_path / "meet"), "size": 24, "flow": flow, "address": cluster.address}
    with interpreter(MESH, json.dumps(given)) as ranks:
        out, err = ranks.communicate(timeout=250)
    assert ranks.returncode == 0, err
    read = {tuple(at): epochs for at, epochs in map(json.loads, out.splitlines())}
    assert read[0, 0] == read[0, 1]
    assert read[1, 0] == read[1, 1]
    for one, other in zip(read[0, 0], read[1, 0], strict=True):
        assert sorted(one + other) == list(range(24))


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


#: Two ranks, of which one reads by itself before the other begins: it peeks at two batches and keeps that iterator.
PEEKING = """
import json, os, sys
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
given = json.loads(sys.argv[1])
other = os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method="file://" + given["meet"], rank=rank, world_size=2)
dataset, epochs = Numbers(given["size"]), []
sampler = DistributedSampler(dataset, seed=3)
loader = DPFlowDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, flow=given["flow"],
                          address=given["address"], job=JobOptions(idle_s=3.0, reconnect_timeout_s=5.0))
if rank == 1:
    kept = iter(loader)
    next(kept), next(kept)
dist.barrier()
for epoch in range(3):
    sampler.set_epoch(epoch)
    epochs.append([int(key) for _, labels in loader for key in labels])
dist.barrier()
os.write(1, (json.dumps([rank, epochs]) + "\\n").encode())  # whole, beside the other's
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.slow
def test_a_rank_peeks_at_batches_and_keeps_its_iterator(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    given = {"meet": str(tmp_path / "meet"), "size": 64, "flow": flow, "address": cluster.address}
    with interpreter(PEEKING, json.dumps(given)) as ranks:
        out, err = ranks.communicate(timeout=250)
    assert ranks.returncode == 0, err
    assert "continues for as long as they take: job" in err
    assert "waits for its ranks [0]" in err
    told = dict(json.loads(line) for line in out.splitlines())
    for first, second in zip(told[0], told[1], strict=True):
        assert sorted(first + second) == list(range(64))


#: Two ranks that take names for jobs, rank 1 first; in another process group, they take them again.
NAMING = """
import json, os, sys
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # ranks that have a store and no connections
from torch_dpflow.loader.flow_job import common_name
read, write = os.pipe()
other = os.fork()
rank, names = int(other == 0), []
for group in range(2):
    store = dist.PrefixStore(str(group), dist.FileStore(sys.argv[1]))
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    if rank == 0:
        os.read(read, 1)
    names += [common_name("flow", 3), common_name("flow", 3), common_name("another", 3), common_name("flow", 4)]
    if rank == 1:
        os.write(write, b"1")
    dist.destroy_process_group()
os.write(1, (json.dumps(names) + "\\n").encode())
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_ranks_agree_on_names_whoever_is_first_and_whatever_an_earlier_attempt_left(tmp_path: Path) -> None:
    seen = []
    for attempt in ("0", "1"):
        env = {"TORCHELASTIC_RESTART_COUNT": attempt}
        with interpreter(NAMING, str(tmp_path / "store"), env=env) as ranks:
            out, err = ranks.communicate(timeout=250)
        assert ranks.returncode == 0, err
        one, other = map(json.loads, out.splitlines())
        assert one == other
        assert len({*one}) == 8
        seen.append(one)
    assert not {*seen[0]} & {*seen[1]}


def test_peers_that_fix_the_order_read_the_same_batches(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    """As tensor-parallel peers do: torch.distributed has more processes than the sampler has replicas."""
    given = {"meet": str(tmp_path / "meet"), "size": 40, "flow": flow, "address": cluster.address}
    with interpreter(PEERS, json.dumps(given)) as peers:
        out, err = peers.communicate(timeout=250)
    assert peers.returncode == 0, err
    one, other = map(json.loads, out.splitlines())
    assert one == other


def test_two_processes_read_disjoint_parts_that_are_drawn_anew_while_another_job_reads(
    cluster: TestCluster, join: Join, flow: str, tmp_path: Path
) -> None:
    given = {"meet": str(tmp_path / "meet"), "size": SIZE, "flow": flow, "address": cluster.address}
    plain = join(flow, Numbers(SIZE), batch_size=8, seed=9)
    with interpreter(PROGRAM, json.dumps(given)) as ranks:
        assert all(sorted(keys(plain.traverse(epoch))) == list(range(SIZE)) for epoch in range(2))
        out, err = ranks.communicate(timeout=250)
    assert ranks.returncode == 0, err
    told = dict(json.loads(line) for line in out.splitlines())
    parts = [told[rank] for rank in range(2)]
    for first, second in zip(*parts, strict=True):
        assert len(first) == len(second) == 51
        # 101 samples for two ranks: one is read twice, as by DistributedSampler.
        assert sorted({*first, *second}) == list(range(SIZE))
        assert len({*first} & {*second}) <= 1
    for part in parts:
        assert {*part[0]} != {*part[1]}


@pytest.fixture
def ranks(join: Join, flow: str) -> Callable[..., list[SharedJob]]:
    """All ranks of one job, in this process."""

    def ranks(count: int, size: int = 96, **given: Any) -> list[SharedJob]:
        return [
            join(
                flow,
                Numbers(size),
                batch_size=4,
                name="job",
                replica=Replica(rank=rank, num_replicas=count),
                **given,
            )
            for rank in range(count)
        ]

    return ranks


def read_together(readings: list[Iterator[Any]]) -> list[list[int]]:
    """What each reads until its end, all of them at once."""
    parts: list[list[int]] = [[] for _ in readings]

    def read(number: int) -> None:
        parts[number] += keys(readings[number])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(readings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return parts


def test_alone_each_rank_reads_what_distributed_sampler_deals(ranks: Any) -> None:
    jobs = ranks(3, size=50, seed=4)
    for epoch in range(2):
        parts = read_together([job.traverse(epoch) for job in jobs])
        for rank, part in enumerate(parts):
            sampler: Any = DistributedSampler(range(50), 3, rank, seed=4)
            sampler.set_epoch(epoch)
            assert part == list(sampler)


def test_a_killed_router_deals_the_rest_to_the_ranks(ranks: Any, cluster: TestCluster, flow: str) -> None:
    jobs = ranks(2, size=400)
    readings = [job.traverse(0) for job in jobs]
    begun = [keys(next(reading) for _ in range(5 + 3 * rank)) for rank, reading in enumerate(readings)]
    cluster.kill(f"{flow}:v1/router")
    rest = read_together(readings)
    assert sorted(chain.from_iterable(begun + rest)) == list(range(400))
    again = read_together([job.traverse(1) for job in jobs])
    assert sorted(chain.from_iterable(again)) == list(range(400))


def test_a_rank_that_comes_back_goes_on_while_the_other_reads(ranks: Any, join: Join, flow: str) -> None:
    jobs = ranks(2)
    readings = [job.traverse(0) for job in jobs]
    begun = [keys(next(reading) for _ in range(4)) for reading in readings]
    state = jobs[1].state()
    jobs[1].close()
    replica = Replica(rank=1, num_replicas=2)
    back = join(flow, Numbers(96), batch_size=4, name="job", replica=replica)
    rest = read_together([readings[0], back.traverse(0, done=state)])
    assert sorted(chain.from_iterable(begun + rest)) == list(range(96))


def test_all_ranks_are_resumed_from_a_checkpoint(ranks: Any) -> None:
    jobs = ranks(2)
    readings = [job.traverse(3) for job in jobs]
    begun = [keys(next(reading) for _ in range(3 + rank)) for rank, reading in enumerate(readings)]
    states = [job.state() for job in jobs]
    for job in jobs:
        job.close()
    again = ranks(2)
    rest = read_together([job.traverse(3, done=state) for job, state in zip(again, states)])
    assert sorted(chain.from_iterable(begun + rest)) == list(range(96))


def test_ranks_that_describe_their_job_differently_are_refused(ranks: Any, join: Join, flow: str) -> None:
    ranks(1, seed=1)
    for given, message in (
        ({"replica": Replica(rank=1, num_replicas=2), "seed": 1}, "num_replicas=2, other ranks have 1"),
        ({"replica": Replica(rank=0, num_replicas=1), "seed": 1}, "being read by another process"),
    ):
        with pytest.raises(UsageError, match=message):
            join(flow, Numbers(96), batch_size=4, name="job", **given)
    with pytest.raises(OptionError, match="without a name"):
        join(flow, Numbers(96), replica=Replica(rank=0, num_replicas=2))


def test_a_name_is_one_jobs_until_that_leaves(join: Join, flow: str) -> None:
    first = join(flow, Numbers(20), name="trial")
    refused = r"job 'trial' is being read by another process; give this one a different name"
    with pytest.raises(UsageError, match=refused):
        join(flow, Numbers(20), name="trial")
    first.close()
    assert sorted(keys(join(flow, Numbers(20), name="trial").traverse(0))) == list(range(20))


#: Reads a flow under a name until it is killed.
NAMED = """
import sys
from tests.new_process import interpreter
from tests.shared_cluster import open_job
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import JobOptions, Replica
flow, address, rank = sys.argv[1:]
replica = Replica(rank=int(rank), num_replicas=1) if rank else None
job = open_job(flow, Numbers(96), address=address, replica=replica, options=JobOptions(name=f"{flow}/killed"))
print("reads", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("rank", ["", "0"])
def test_a_job_takes_over_its_name_at_once_from_a_process_of_its_host_that_was_killed(
    cluster: TestCluster, join: Join, flow: str, rank: str
) -> None:
    name = f"{flow}/killed"
    replica = Replica(rank=0, num_replicas=1) if rank else None
    with interpreter(NAMED, flow, cluster.address, rank, stdin=-1) as former:
        assert former.stdout is not None
        assert former.stdout.readline() == "reads\n"
        with pytest.raises(UsageError, match="being read by another process"):
            join(flow, Numbers(96), name=name, replica=replica)
        former.kill()
    job = join(flow, Numbers(96), name=name, replica=replica)
    assert sorted(keys(job.traverse(0))) == list(range(96))
    ends = [line for line in cluster.log.read_text().splitlines() if "lease expired" in line and name in line]
    assert not ends, "it has waited for the lease"


@pytest.mark.parametrize("kind", [DistributedSampler, DynaGCSSampler])
def test_a_loader_of_one_rank_goes_on_from_its_state(cluster: TestCluster, flow: str, kind: Any) -> None:
    def make() -> DPFlowDataLoader[Any]:
        dataset = Numbers(60)
        return DPFlowDataLoader(
            dataset,
            batch_size=4,
            sampler=kind(dataset, num_replicas=1, rank=0, seed=2),
            num_workers=2,
            flow=flow,
            address=cluster.address,
            job=JobOptions(idle_s=3.0),
        )

    loader = make()
    loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
    iterator = iter(loader)
    begun = keys(next(iterator) for _ in range(6))
    again = make()
    again.load_state_dict(loader.state_dict())
    assert sorted(begun + keys(again)) == list(range(60))
    assert again.sampler.epoch == 5  # type: ignore[attr-defined]
    again.sampler.set_epoch(6)  # type: ignore[attr-defined]
    assert sorted(keys(again)) == list(range(60))


def test_iterations_of_a_sampler_without_ranks_are_epochs(cluster: TestCluster, flow: str) -> None:
    sampler = DynaGCSSampler(range(10, 40), seed=2)
    loader = DPFlowDataLoader(
        Numbers(60),
        batch_size=4,
        sampler=sampler,
        num_workers=2,
        flow=flow,
        address=cluster.address,
        job=JobOptions(idle_s=3.0),
    )
    expected = DynaGCSSampler(range(10, 40), seed=2)
    assert [keys(loader) for _ in range(3)] == [list(expected) for _ in range(3)]


def test_ranks_of_one_name_whose_order_the_sampler_keeps_read_side_by_side(cluster: TestCluster, flow: str) -> None:
    dataset = Numbers(40)
    samplers = [DistributedSampler(dataset, 2, rank, shuffle=False) for rank in range(2)]
    loaders = [
        DPFlowDataLoader(
            dataset,
            batch_size=5,
            sampler=sampler,
            num_workers=1,
            flow=flow,
            address=cluster.address,
            job=JobOptions(name=f"{flow}/ranks", idle_s=3.0),
        )
        for sampler in samplers
    ]
    read = [keys(batches) for batches in zip(*loaders, strict=True)]
    assert sorted(chain.from_iterable(read)) == list(range(40))
    assert read[0] == [*range(0, 10, 2), *range(1, 11, 2)]
