"""Jobs as processes of their own, which note every sample that they are given."""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster

#: Reads epochs and writes one line for each batch: the epoch and the keys, and "end" after an epoch.
PROGRAM = """
import json, sys, time
from tests.shared_datasets import SlowNumbers
from torch_dpflow.remote.client import JobOptions, open_job
given = json.loads(sys.argv[1])
options = JobOptions(idle_s=30.0, patience_s=100.0, shards=given["shards"], asked=given["asked"])
job = open_job(given["flow"], SlowNumbers(given["size"], given["cost_s"]), address=given["address"],
               batch_size=given["batch"], seed=given["seed"], workers=given["workers"], options=options)
with job, open(given["log"], "w") as log:
    for epoch in range(given["epochs"]):
        for values, keys in job.traverse(epoch):
            assert (values[:, 0] == keys).all()
            print(json.dumps([epoch, keys.tolist(), time.time()]), file=log, flush=True)
            time.sleep(given["step_s"])
        print(json.dumps([epoch, "end", time.time()]), file=log, flush=True)
"""


@dataclass
class ChaosJob:
    """One training run."""

    process: subprocess.Popen[str]
    log: Path
    size: int
    epochs: int

    @classmethod
    def start(
        cls,
        cluster: TestCluster,
        folder: Path,
        *,
        flow: str,
        number: int,
        size: int,
        epochs: int,
        step_s: float = 0.0,
        cost_s: float = 0.001,
        shards: int = 1,
        workers: int = 2,
    ) -> ChaosJob:
        log = folder / f"job-{number}"
        given = {
            "flow": flow,
            "size": size,
            "cost_s": cost_s,
            "address": cluster.address,
            "batch": 8,
            "seed": number,
            "workers": workers,
            "shards": shards,
            "asked": 6,
            "epochs": epochs,
            "step_s": step_s,
            "log": str(log),
        }
        return cls(interpreter(PROGRAM, json.dumps(given)), log, size, epochs)

    def lines(self) -> list[list[object]]:
        if not self.log.exists():
            return []
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def batches(self) -> int:
        return sum(1 for line in self.lines() if line[1] != "end")

    def finish(self, timeout_s: float = 150.0) -> None:
        """Wait for its end, and check that every epoch was every sample once."""
        try:
            _, errors = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"a job hangs after {self.batches()} batches") from None
        assert self.process.returncode == 0, errors
        seen: dict[int, list[int]] = {epoch: [] for epoch in range(self.epochs)}
        for epoch, keys, _ in self.lines():
            if keys != "end":
                seen[int(str(epoch))] += keys  # type: ignore[operator]
        for epoch, keys_of_epoch in seen.items():
            assert sorted(keys_of_epoch) == list(range(self.size)), f"epoch {epoch}"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def longest_stall_s(self) -> float:
        """The longest time between two batches."""
        times = [float(str(line[2])) for line in self.lines()]
        return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)
