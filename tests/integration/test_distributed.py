"""Two ranks of a data-parallel job."""

from __future__ import annotations

import json
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from tests.loader_cases import Indices
from tests.new_process import interpreter
from tests.shared_cluster import free_port

RANKS = 2
SIZE = 23

#: Imports once, which takes most of its time: the ranks are forked before anything of torch.distributed is used.
TRAINING = """
import json, os, sys
import torch
import torch._dynamo  # as DistributedDataParallel does
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader

other = os.fork()
rank = int(other == 0)
os.environ["RANK"] = str(rank)
dist.init_process_group("gloo")
sampler = DistributedSampler(range(int(sys.argv[1])), shuffle=True, seed=5)
loader = DPFlowDataLoader(Indices(int(sys.argv[1])), batch_size=3, sampler=sampler, num_workers=2)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
seen = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        model(batch.float().unsqueeze(1)).sum().backward()
        seen.append(batch.tolist())
gradient = model.module.weight.grad.clone()
others = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
dist.all_gather(others, gradient)
assert all(torch.equal(other, gradient) for other in others)
dist.destroy_process_group()
os.write(1, (json.dumps([rank, seen]) + "\\n").encode())  # whole, beside the other's
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def expected(rank: int) -> list[list[int]]:
    sampler: Any = DistributedSampler(range(SIZE), num_replicas=RANKS, rank=rank, seed=5)
    loader = DataLoader(Indices(SIZE), batch_size=3, sampler=sampler)
    batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches += [batch.tolist() for batch in loader]
    return batches


def test_ranks_read_what_torchs_loader_gives_them(OurLoader: Any) -> None:
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
    }
    with interpreter(TRAINING, str(SIZE), env=group) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    told = dict(json.loads(line) for line in out.splitlines())
    seen = [told[rank] for rank in range(RANKS)]
    assert seen == [expected(rank) for rank in range(RANKS)]
    first_epoch = [{i for batch in batches[: len(batches) // 2] for i in batch} for batches in seen]
    assert set.union(*first_epoch) == set(range(SIZE))
    assert len(set.intersection(*first_epoch)) <= 1, "only the sample that pads the last rank is read twice"
