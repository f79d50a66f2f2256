"""DynaGCSSampler in two processes with torch.distributed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.new_process import run_interpreter

#: Both ranks, of one process that imports for both.
RANKS = """
import json, os, sys
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch_dpflow.samplers import DynaGCSSampler, sampling_group

other = os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
told = {}
for mode in ("alone", "grouped"):
    group = sampling_group("shared-log", 37) if mode == "grouped" else None
    sampler = DynaGCSSampler(range(37), group=group, batch_size=4, seed=3)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(range(37), batch_size=4, sampler=sampler)
        epochs.append([index for batch in loader for index in batch.tolist()])
    parts = [None, None]
    dist.all_gather_object(parts, epochs)
    told[mode] = [sampler.num_replicas, sampler.rank, parts]
dist.destroy_process_group()
os.write(1, (json.dumps([rank, told]) + "\\n").encode())  # whole, beside the other's
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank says in each mode: the ranks, its own, and what all ranks read in each epoch."""
    rendezvous = str(tmp_path_factory.mktemp("ranks") / "rendezvous")
    done = run_interpreter(RANKS, rendezvous, timeout_s=250)
    assert done.returncode == 0, done.stderr
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    return [told[rank] for rank in range(2)]


@pytest.mark.parametrize("mode", ["alone", "grouped"])
def test_ranks_take_their_number_from_torch_and_share_one_epoch(told: list[Any], mode: str) -> None:
    assert [each[mode][:2] for each in told] == [[2, 0], [2, 1]]
    parts, other = (each[mode][2] for each in told)
    assert parts == other
    for epoch in range(2):
        read = parts[0][epoch] + parts[1][epoch]
        assert len(parts[0][epoch]) == len(parts[1][epoch]) == 19
        assert set(read) == set(range(37))
        if mode == "alone":
            for rank in range(2):
                theirs: Any = DistributedSampler(range(37), num_replicas=2, rank=rank, seed=3)
                theirs.set_epoch(epoch)
                assert parts[rank][epoch] == list(theirs)
    assert parts[0][0] != parts[0][1]
