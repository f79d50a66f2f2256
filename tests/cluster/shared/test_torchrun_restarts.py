"""Ranks of an unnamed flow that torchrun restarts: the second attempt agrees on a name of its own and reads all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pages import run
from tests.shared_cluster import TestCluster

SIZE, EPOCHS = 64, 2

#: One rank. In the first attempt, rank 1 is killed in mid-epoch.
JOB = """
import json, os, signal, sys
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.utils.data import DistributedSampler
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
given = json.loads(sys.argv[1])
is_agents = given["backend"] == "fake"  # ranks without connections, which take torchrun's own store
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False) if is_agents else None
dist.init_process_group(given["backend"], store=store, rank=int(os.environ["RANK"]), world_size=2)
attempt, epochs = os.environ["TORCHELASTIC_RESTART_COUNT"], []
sampler = DistributedSampler(Numbers(given["size"]), seed=3)
loader = DPFlowDataLoader(sampler.dataset, batch_size=4, sampler=sampler, num_workers=2, flow=given["flow"],
                          address=given["address"], job=JobOptions(idle_s=3.0))
for epoch in range(given["epochs"]):
    sampler.set_epoch(epoch)
    epochs.append([])
    for number, (_, labels) in enumerate(loader):
        epochs[-1] += labels.tolist()
        if number == 2 and attempt == "0" and dist.get_rank() == 1:
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
with open(f"{attempt}-{dist.get_rank()}.json", "w") as file:
    json.dump(epochs, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fake", "gloo"])
def test_ranks_that_torchrun_restarts_read_every_sample_once(
    cluster: TestCluster, flow: str, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Attempts share the store of torchrun, where gloo finds the first one's addresses, to which nothing listens.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1" if backend == "gloo" else "0")
    (tmp_path / "job.py").write_text(JOB)
    given = {"size": SIZE, "epochs": EPOCHS, "flow": flow, "address": cluster.address, "backend": backend}
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    run("-m", *torchrun, "job.py", json.dumps(given), directory=tmp_path)
    assert (tmp_path / "killed").exists()
    assert not (tmp_path / "0-1.json").exists()
    one, other = (json.loads((tmp_path / f"1-{rank}.json").read_text()) for rank in range(2))
    assert len(one) == len(other) == EPOCHS
    for first, second in zip(one, other):
        assert len(first) == len(second) == SIZE // 2
        assert sorted(first + second) == list(range(SIZE))
    assert one[0] != one[1]
