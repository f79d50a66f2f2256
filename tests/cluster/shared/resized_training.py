"""A training script for torchrun: its ranks read a flow and save a checkpoint, to be killed and resumed at any size.

The checkpoint holds what all ranks had read by then; what they read after it is read again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler, JobOptions

SIZE, EPOCHS = 420, 2


def loader_of(given: dict[str, Any], **ranks: int) -> DPFlowDataLoader[Any]:
    """ranks: `num_replicas` and `rank`, where torch.distributed does not say them."""
    dataset = Numbers(SIZE)
    kind: Any = {"DistributedSampler": DistributedSampler, "DynaGCSSampler": DynaGCSSampler}[given["sampler"]]
    flow: dict[str, Any] = {}
    if given["flow"]:
        job = JobOptions(idle_s=3.0, name=given["name"])
        flow = {"flow": given["flow"], "address": given["address"], "job": job}
    return DPFlowDataLoader(
        dataset,
        batch_size=given["batch_size"],
        sampler=kind(dataset, seed=3, **ranks),
        num_workers=given["workers"],
        **flow,
    )


def main(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    dist.init_process_group("gloo")
    loader = loader_of(given)
    begin = 0
    read: list[list[int]] = [[] for _ in range(EPOCHS)]
    latest = folder / "latest"
    if latest.exists():
        saved = json.loads(latest.read_text())
        begin = saved["epoch"]
        if dist.get_rank() == 0:
            read = saved["read"]
        states = saved["states"]
        loader.load_state_dict(states if given["all_states"] else states[len(states) // 2])
    step = 0
    for epoch in range(begin, EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for _, labels in loader:
            read[epoch] += labels.tolist()
            step += 1
            if step == given["checkpoint"]:
                save(folder, step, epoch, loader, read)
            if step == given["checkpoint"] + 1:
                time.sleep(1000)  # until it is killed
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, read)
    if dist.get_rank() == 0:
        (folder / "read").write_text(json.dumps(everyone))
    dist.destroy_process_group()


def save(folder: Path, step: int, epoch: int, loader: Any, read: list[list[int]]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [loader.state_dict(), read])
    if dist.get_rank() == 0:
        joined = [[*chain.from_iterable(part[number] for _, part in everyone)] for number in range(EPOCHS)]
        saved = {"epoch": epoch, "states": [state for state, _ in everyone], "read": joined}
        new = folder / f"{step}.new"
        new.write_text(json.dumps(saved))
        os.replace(new, folder / "latest")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
