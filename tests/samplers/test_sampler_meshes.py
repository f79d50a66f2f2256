"""Ranks from a dimension of a DeviceMesh or from a process group, in real processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.new_process import run_interpreter
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.samplers import DynaGCSSampler

CASES = {
    "four": ([2, 2], ["dp", "tp"], ["dp"]),
    "four, inner": ([2, 2], ["pp", "dp"], ["dp"]),
    "eight": ([2, 2, 2], ["dp", "cp", "tp"], ["dp", "cp"]),
}
#: All ranks of all cases, of one process that imports for them: each writes where it is and what it reads.
PROGRAM = """
import json, math, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler
from torch_dpflow.errors import OptionError

def read(sampler, epoch):
    sampler.set_epoch(epoch)
    loaders = [load(range(13), batch_size=3, sampler=sampler) for load in (DataLoader, DPFlowDataLoader)]
    return [[key for batch in loader for key in batch.tolist()] for loader in loaders]

def refusal(ranks):
    try:
        DynaGCSSampler(range(13), ranks=ranks)
    except OptionError as error:
        return str(error)

def run(case, number):
    shape, names, along = cases[case]
    meet = "file://" + os.path.join(sys.argv[1], case)
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=math.prod(shape))
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    ranks = mesh[tuple(along)] if len(along) == 1 else mesh[tuple(along)]._flatten()
    said = []
    for value in (ranks, ranks.get_group()):
        sampler = DynaGCSSampler(range(13), ranks=value, seed=5)
        said.append([sampler.num_replicas, sampler.rank, [read(sampler, epoch) for epoch in range(2)]])
    refused = [refusal(mesh), refusal(dist.new_group([0]))]
    line = [case, number, dict(zip(names, mesh.get_coordinate())), said, refused]
    dist.barrier()
    os.write(1, (json.dumps(line) + "\\n").encode())  # whole, beside the others'
    dist.destroy_process_group()

cases = json.loads(sys.argv[2])
for case, (shape, _, _) in cases.items():
    forked = []
    for number in range(math.prod(shape)):
        forked.append(os.fork())
        if not forked[-1]:
            run(case, number)
            os._exit(0)
    if any(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in forked):
        sys.exit(f"a rank of {case} has failed")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of each case says."""
    done = run_interpreter(PROGRAM, str(tmp_path_factory.mktemp("meet")), json.dumps(CASES), timeout_s=250)
    assert done.returncode == 0, done.stderr
    lines = sorted(json.loads(line) for line in done.stdout.splitlines())
    return {case: [line[1:] for line in lines if line[0] == case] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_peers_of_other_dimensions_read_the_same_and_ranks_along_it_disjoint_samples(
    case: str, said: dict[str, list[Any]]
) -> None:
    shape, _, along = CASES[case]
    replicas = 2 ** len(along)
    assert [number for number, *_ in said[case]] == list(range(2 ** len(shape)))
    for number, coordinate, of_ranks, (of_mesh, of_first) in said[case]:
        place = int("".join(str(coordinate[name]) for name in along), 2)
        expected = []
        for epoch in range(2):
            theirs: Any = DistributedSampler(range(13), replicas, place, seed=5)
            theirs.set_epoch(epoch)
            expected.append([list(theirs)] * 2)
        assert of_ranks == [[replicas, place, expected]] * 2, "by the mesh, and by its process group"
        assert f"{len(shape)} dimensions" in of_mesh
        assert (of_first is None) == (number == 0)
        assert number == 0 or "this process is not in the process group" in of_first


def test_what_gives_no_ranks_is_refused() -> None:
    with pytest.raises(OptionTypeError, match=r"ranks=4 is of type int; give one dimension of a DeviceMesh"):
        DynaGCSSampler(range(8), ranks=4)
    for numbers in ({"num_replicas": 2}, {"rank": 0}):
        with pytest.raises(OptionError, match="both come from ranks="):
            DynaGCSSampler(range(8), ranks=object(), **numbers)
    with pytest.raises(OptionTypeError, match="ranks="):
        DynaGCSSampler(range(8), ranks=DPFlowDataLoader(range(8)))
