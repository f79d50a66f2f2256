"""DynaGCSSampler in two processes with torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.new_process import interpreter

RANK = """
import json, sys
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch_dpflow.samplers import DynaGCSSampler, sampling_group

rank, rendezvous, grouped = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "grouped"
dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=2)
group = sampling_group("shared-log", 37) if grouped else None
sampler = DynaGCSSampler(range(37), group=group, batch_size=4, seed=3)
epochs = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    loader = DataLoader(range(37), batch_size=4, sampler=sampler)
    epochs.append([index for batch in loader for index in batch.tolist()])
parts = [None, None]
dist.all_gather_object(parts, epochs)
dist.destroy_process_group()
print(json.dumps([sampler.num_replicas, sampler.rank, parts]))
"""


def run_ranks(tmp_path: Path, mode: str) -> list[list[list[int]]]:
    """What each rank read in each epoch, as both ranks have gathered it."""
    rendezvous = str(tmp_path / "rendezvous")
    ranks = [interpreter(RANK, str(rank), rendezvous, mode) for rank in range(2)]
    gathered: list[Any] = []
    for rank, process in enumerate(ranks):
        with process:
            out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        replicas, own, parts = json.loads(out.splitlines()[-1])
        assert (replicas, own) == (2, rank)
        gathered.append(parts)
    assert gathered[0] == gathered[1]
    return gathered[0]


@pytest.mark.parametrize("mode", ["alone", "grouped"])
def test_ranks_take_their_number_from_torch_and_share_one_epoch(tmp_path: Path, mode: str) -> None:
    parts = run_ranks(tmp_path, mode)
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
