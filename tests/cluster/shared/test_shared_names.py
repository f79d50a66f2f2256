"""Jobs of one name: ranks as numbers, loaders of one process, process groups that change, meshes without peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler, Subset

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import BudgetBatchSampler, DPFlowDataLoader, DynaGCSSampler, JobOptions, MixtureSampler

slow = pytest.mark.slow
SIZE = 24
Make = Callable[..., DPFlowDataLoader[Any]]


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Make:
    def make(**given: Any) -> DPFlowDataLoader[Any]:
        size = {} if "batch_sampler" in given else {"batch_size": 4}
        options = JobOptions(name=f"{flow}/run", idle_s=3.0)
        arguments = {"dataset": Numbers(SIZE), "num_workers": 1, "flow": flow, "address": cluster.address}
        return DPFlowDataLoader(**arguments | {"job": options} | size | given)

    return make


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


SAMPLERS: dict[str, Callable[..., dict[str, Any]]] = {
    "DistributedSampler": lambda *ranks: {"sampler": DistributedSampler(Numbers(SIZE), *ranks, seed=3)},
    "DynaGCSSampler": lambda count, rank: {
        "sampler": DynaGCSSampler(Numbers(SIZE), num_replicas=count, rank=rank, seed=3)
    },
    "MixtureSampler": lambda count, rank: {
        "sampler": MixtureSampler([10, 14], [5, 7], num_replicas=count, rank=rank, seed=3)
    },
    "BudgetBatchSampler": lambda count, rank: {
        "batch_sampler": BudgetBatchSampler([1] * SIZE, 4, num_replicas=count, rank=rank, seed=3)
    },
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_ranks_by_numbers_have_a_common_name(make: Make, kind: str) -> None:
    loaders = [make(**SAMPLERS[kind](2, rank)) for rank in range(2)]
    read = [keys(batches) for batches in zip(*loaders, strict=True)]
    assert sorted(chain.from_iterable(read)) == list(range(SIZE))


@pytest.mark.parametrize(
    "given",
    [
        {"shuffle": True},
        {"shuffle": False},
        {"batch_sampler": BudgetBatchSampler([1] * SIZE, 4, num_replicas=1, rank=0)},
    ],
    ids=["routed", "sequential", "budget"],
)
def test_two_loaders_of_one_process_are_read_in_turns(make: Make, given: dict[str, Any]) -> None:
    train, test = make(**given), make(dataset=Subset(Numbers(SIZE), range(5, 15)))
    for _ in range(2):
        assert sorted(keys(train)) == list(range(SIZE))
        assert keys(test) == list(range(5, 15))
    begun = iter(train)
    first = keys([next(begun)])
    assert keys(test) == list(range(5, 15))
    assert sorted(first + keys(begun)) == list(range(SIZE))


@pytest.mark.parametrize("kind", ["DistributedSampler", "DynaGCSSampler"])
def test_two_loaders_of_each_rank_are_read_in_turns(make: Make, kind: str) -> None:
    ranks = [[make(**SAMPLERS[kind](2, rank)) for _ in range(2)] for rank in range(2)]
    for _ in range(2):
        for loaders in zip(*ranks):
            read = [keys(batches) for batches in zip(*loaders, strict=True)]
            assert sorted(chain.from_iterable(read)) == list(range(SIZE))


#: Processes that form groups of several sizes, one after the other, and keep their iterators. Rank 0 is another process
#: in each group, and the ranks are given to the sampler by it or as numbers.
GROUPS = """
import json, os, sys
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
given = json.loads(sys.argv[1])
number, others = 0, []
for other in (1, 2):
    others.append(os.fork())
    if not others[-1]:
        number, others = other, []
        break
kept, read = [], []
loader = None
dataset = Numbers(given["size"])
for attempt, members in enumerate([[0, 1], [2, 1, 0], [1, 2]]):
    if number not in members:
        loader, batches, kept = None, None, []  # else this process holds the name
        continue
    rank, ranks = members.index(number), len(members)
    dist.init_process_group("gloo", init_method=f"file://{given['meet']}{attempt}", rank=rank, world_size=ranks)
    sampler = DistributedSampler(dataset, seed=3)
    if loader is None or given["is_new"]:
        loader = DPFlowDataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1, flow=given["flow"],
                                  address=given["address"],
                                  job=JobOptions(name=given["name"], idle_s=3.0))
    else:
        vars(loader.batch_sampler)["sampler"] = vars(loader)["sampler"] = sampler
    batches = iter(loader)
    read.append([attempt, [int(key) for _, labels in batches for key in labels]])
    kept.append(iter(loader))
    next(kept[-1])
    dist.barrier()
    dist.destroy_process_group()
os.write(1, (json.dumps(read) + "\\n").encode())  # whole, beside the others'
if any(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others):
    sys.exit("a process has failed")
"""


@pytest.mark.parametrize(
    ("name", "is_new"),
    [("run", True), *(pytest.param(*one, marks=slow) for one in [("run", False), (None, True), (None, False)])],
)
def test_processes_change_their_group_and_keep_iterators(
    cluster: TestCluster, flow: str, tmp_path: Path, name: str | None, is_new: bool
) -> None:
    given = {"meet": str(tmp_path / "meet"), "size": SIZE, "flow": flow, "address": cluster.address}
    with interpreter(GROUPS, json.dumps(given | {"name": name, "is_new": is_new})) as ranks:
        out, err = ranks.communicate(timeout=250)
    assert ranks.returncode == 0, err
    read = [epoch for line in out.splitlines() for epoch in json.loads(line)]
    for attempt in range(3):
        assert sorted(chain.from_iterable(keys for at, keys in read if at == attempt)) == list(range(SIZE))


#: Four ranks of which two read the same, and then two that read a half each, or the other way round.
MESHES = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.cluster.shared.test_shared_names import SAMPLERS
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.errors import StateError
given = json.loads(sys.argv[1])
rank, others = 0, []
for number in range(1, given["ranks"]):
    others.append(os.fork())
    if not others[-1]:
        rank, others = number, []
        break
dist.init_process_group("gloo", init_method="file://" + given["meet"], rank=rank, world_size=given["ranks"])
mesh = init_device_mesh("cpu", (2, given["ranks"] // 2), mesh_dim_names=("dp", "tp"))
outcome = []
for kind, make in SAMPLERS.items():
    sampler = make(2, mesh["dp"].get_local_rank())
    size = {} if "batch_sampler" in sampler else {"batch_size": 4}
    loader = DPFlowDataLoader(Numbers(given["size"]), num_workers=1, flow=given["flow"], address=given["address"],
                              job=JobOptions(idle_s=3.0), **size, **sampler)
    state = given["states"].get(kind)
    try:
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        read = [int(key) for _, labels in [next(batches)] for key in labels]
        saved = loader.state_dict()
        read += [] if state is None else [int(key) for _, labels in batches for key in labels]
        again = [] if state is None else [int(key) for _, labels in loader for key in labels]
        outcome.append([kind, read, again, saved])
    except StateError as error:
        outcome.append([kind, None, str(error), None])
dist.barrier()
with open(f"{given['meet']}-{rank}", "w") as file:  # a pipe would mix what several processes write
    json.dump([mesh.get_coordinate(), outcome], file)
dist.destroy_process_group()
if any(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others):
    sys.exit("a rank has failed")
"""


@pytest.mark.parametrize(("before", "after"), [(4, 2), pytest.param(2, 4, marks=slow)])
def test_a_mesh_with_peers_before_and_none_after(
    cluster: TestCluster, flow: str, tmp_path: Path, before: int, after: int
) -> None:
    """And the other way round, where an order of the router cannot be continued: that is an error at once."""
    states: dict[str, Any] = {}
    seen: dict[str, list[int]] = {}
    for number, ranks in enumerate((before, after)):
        given = {"meet": str(tmp_path / f"meet{number}"), "size": SIZE, "flow": flow, "address": cluster.address}
        with interpreter(MESHES, json.dumps(given | {"ranks": ranks, "states": states})) as processes:
            _, err = processes.communicate(timeout=250)
        assert processes.returncode == 0, err
        read = [json.loads(file.read_text()) for file in tmp_path.glob(f"meet{number}-*")]
        outcomes = {tuple(at): outcome for at, outcome in read}
        if not number:
            for kind, read, _, state in outcomes[0, 0] + outcomes[1, 0]:
                seen[kind] = seen.get(kind, []) + read
                states[kind] = state
    for one, other in zip(outcomes[0, 0], outcomes[1, 0], strict=True):
        kind, read, again, _ = one
        if read is None:
            assert before == 2
            assert "order the router of a shared flow decided" in again
        else:
            assert sorted(seen[kind] + read + other[1]) == list(range(SIZE))
            assert sorted(again + other[2]) == list(range(SIZE))
        assert (read is None) == (before == 2 and kind in ("DistributedSampler", "DynaGCSSampler"))
