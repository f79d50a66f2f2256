"""Jobs of torch.distributed that are killed, and resumed by another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.new_process import ROOT, run_interpreter
from tests.shared_cluster import free_port

SIZE = 600

#: Trains until it has reached its step, saves every third step, and then waits to be killed; the last run ends itself.
TRAIN = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler


def main(folder, kind, size, batch_size, steps, run):
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), f"{folder}/checkpoint"
    sampler = {"DistributedSampler": DistributedSampler, "DynaGCSSampler": DynaGCSSampler}[kind](Indices(size), seed=7)
    loader = DPFlowDataLoader(Indices(size), batch_size=batch_size, sampler=sampler, num_workers=1)
    sampler.set_epoch(2)
    if os.path.exists(saved):
        with open(saved) as file:
            loader.load_state_dict(json.load(file)["loader"])
    with open(f"{folder}/log-{run}-{rank}", "w") as log:
        for step, batch in enumerate(loader, 1):
            print(json.dumps([step, batch.tolist()]), file=log, flush=True)
            dist.barrier()
            if step % 3 == 0 and rank == step // 3 % dist.get_world_size():  # any rank's state will do
                with open(saved + ".new", "w") as file:
                    json.dump({"loader": loader.state_dict(), "run": run, "step": step}, file)
                os.replace(saved + ".new", saved)
            dist.barrier()
            if step == steps:
                print(f"pid {os.getpid()}", flush=True)
                signal.pause()
    dist.destroy_process_group()
    print("ended", flush=True)
"""
MAIN = "\n\nmain(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))\n"

#: The same with ranks that are forked from one interpreter, which imports once.
FORKED = """
folder, kind, size, ports = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")
for run, (ranks, batch_size, steps) in enumerate(json.loads(sys.argv[5])):
    children, pipes = [], []
    for rank in range(ranks):
        here, there = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(there, 1)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=ports[run])
            torch.set_num_threads(1)
            main(folder, kind, size, batch_size, steps, run)
            os._exit(0)
        os.close(there)
        children.append(child)
        pipes.append(here)
    for here, child in zip(pipes, children):
        with open(here, "rb") as pipe:  # line by line: unbuffered output comes in parts
            line = pipe.readline()
        if line.startswith(b"pid"):
            os.kill(child, signal.SIGKILL)
        else:
            assert line == b"ended\\n", line
        os.waitpid(child, 0)
"""

#: Ranks, batch size, and steps until it is killed; the last one reads to the end.
PHASES = [(4, 5, 8), (2, 8, 5), (3, 4, 7), (1, 16, 4), (5, 3, 10**6)]


def check(folder: Path, phases: list[tuple[int, int, int]]) -> None:
    """Count each run's batches up to the step of its last checkpoint: what came after was not trained on."""
    counted = list[int]()
    for run, (ranks, _, steps) in enumerate(phases):
        last = steps - steps % 3 if run < len(phases) - 1 else steps
        for rank in range(ranks):
            lines = (folder / f"log-{run}-{rank}").read_text().splitlines()
            counted += [index for step, batch in map(json.loads, lines) if step <= last for index in batch]
    assert set(counted) == set(range(SIZE))
    before = sum(ranks * batch * (steps - steps % 3) for ranks, batch, steps in phases[:-1])
    assert len(counted) - SIZE == -(SIZE - before) % phases[-1][0], "each once, but for the padding of the last ranks"


def test_forked_ranks_are_killed_and_resumed_by_another_number(tmp_path: Path) -> None:
    phases = [PHASES[1], (3, 7, 10**6)]
    ports = ",".join(str(free_port()) for _ in phases)
    code = TRAIN + FORKED
    done = run_interpreter(code, str(tmp_path), "DynaGCSSampler", str(SIZE), ports, json.dumps(phases))
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, phases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DistributedSampler", "DynaGCSSampler"])
def test_torchrun_is_killed_and_resumed_by_other_torchruns(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN + MAIN)
    for run, (ranks, batch_size, steps) in enumerate(PHASES):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        arguments = (str(script), str(tmp_path), kind, *map(str, (SIZE, batch_size, steps, run)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        with subprocess.Popen((*torchrun, *arguments), stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            pids, ended = list[int](), 0
            while len(pids) + ended < ranks:
                line = process.stdout.readline()
                assert line, "torchrun ended early"
                pids += [int(line.split()[1])] if line.startswith("pid") else []
                ended += line == "ended\n"
            for pid in [process.pid, *pids] if pids else []:  # the agent first: it would end its ranks gently
                os.kill(pid, signal.SIGKILL)
        assert process.returncode == (-signal.SIGKILL if pids else 0)
    check(tmp_path, PHASES)
