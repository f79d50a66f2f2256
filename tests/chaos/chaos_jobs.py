"""Jobs as processes of their own, which can be killed and come back, and whose every epoch is checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.reading import Reading
from tests.new_process import ROOT, interpreter
from tests.shared_cluster import TestCluster, wait
from tests.worker_cases import has_ended

_NURSE = "import sys; from tests.chaos.reading import nurse; nurse(sys.stdin, sys.stdout)"


class Nursery:
    """A process of which jobs are forked."""

    def __init__(self, *command: str, path: Path | None = None) -> None:
        """Command: runs an interpreter elsewhere, such as in another network namespace; path: as of `TestCluster`."""
        env = {} if path is None else {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
        self._process = interpreter(_NURSE, stdin=subprocess.PIPE, prefix=command, env=env)

    def fork(self, given: Reading) -> int:
        """Start a job; its process id."""
        return self._tell("fork", asdict(given))

    def bury(self, pid: int) -> int:
        """Reap a job that ends, whose process id may be another's from then on; its exit code."""
        return self._tell("bury", pid)

    def close(self) -> None:
        """End all jobs."""
        self._process.communicate()

    def _tell(self, command: str, argument: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([command, argument]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the jobs' parent has ended"
        return int(line)


@dataclass
class ChaosJob:
    """One training run."""

    nursery: Nursery
    given: Reading
    pid: int = 0
    #: Whether it was started and is not buried.
    alive: bool = field(default=False)

    @classmethod
    def start(cls, nursery: Nursery, cluster: TestCluster, folder: Path, *, number: int, **options: Any) -> ChaosJob:
        own = folder / f"job-{number}"
        own.mkdir()
        job = cls(nursery, Reading(address=cluster.address, folder=str(own), number=number, **options))
        job.revive()
        return job

    def revive(self) -> None:
        """Start it, from its last checkpoint on."""
        self.pid = self.nursery.fork(self.given)
        self.alive = True

    def kill(self) -> None:
        """End it; it may be revived."""
        os.kill(self.pid, signal.SIGKILL)
        self._bury()

    def _bury(self) -> int:
        self.alive = False
        return self.nursery.bury(self.pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.alive and has_ended(self.pid) and bool(self.error())

    def error(self) -> str:
        path = Path(self.given.folder) / "error"
        return path.read_text() if path.exists() else ""

    def lines(self) -> list[list[Any]]:
        log = Path(self.given.folder) / "log"
        if not log.exists():
            return []
        whole, _, _ = log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def batches(self) -> int:
        return sum(1 for line in self.lines() if line[1] != "end")

    def finish(self, timeout_s: float = 150.0) -> int:
        """Wait for its end, and check every epoch; how many there were."""
        try:
            wait(lambda: has_ended(self.pid), within_s=timeout_s, what="the end of a job")
        except AssertionError:
            raise AssertionError(f"job {self.given.number} hangs after {self.batches()} batches") from None
        code = self._bury()
        assert code == 0, f"exit code {code}: {self.error()}"
        return self.check()

    def check(self) -> int:
        """Every epoch is every sample once, in the order of its plan where that is the job's own."""
        epochs: list[list[int]] = [[]]
        for epoch, keys, _ in self.lines():
            assert epoch == len(epochs) - 1, f"epoch {epoch} after {len(epochs) - 1}"
            if keys == "end":
                epochs.append([])
            else:
                epochs[-1] += keys
        assert epochs.pop() == [], "an epoch was not read to its end"
        assert len(epochs) >= self.given.epochs
        sampler = self.given.sampler()
        for epoch, order in enumerate(epochs):
            assert sorted(order) == list(range(self.given.size)), f"epoch {epoch}"
            if sampler is not None:
                sampler.set_epoch(epoch)
                plan = list(sampler)
                differing = [place for place in range(len(plan)) if order[place] != plan[place]]
                assert not differing, (
                    f"epoch {epoch}: the plan has {plan[differing[0] :][:16]} where the job got "
                    f"{order[differing[0] :][:16]}, from sample {differing[0]} on; {len(differing)} differ"
                )
        return len(epochs)
