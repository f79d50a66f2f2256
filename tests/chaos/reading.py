"""A training run for the chaos tests: notes what it is given, saves its state, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils.data import DistributedSampler

from tests.chaos.expiring_keys import Stored
from tests.shared_datasets import HeldUp
from torch_dpflow import DPFlowDataLoader, JobOptions


class OwnOrder(DistributedSampler[Any]):
    """An order that stays the job's own: of a kind that the router does not stand in for."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a job reads, and how."""

    flow: str
    #: The cluster's connection file.
    address: str
    #: Of the job alone.
    folder: str
    #: Its seed, too.
    number: int
    size: int
    #: It reads these, and then goes on until there is a file `enough` beside its folder, if `endless`.
    epochs: int
    endless: bool = False
    #: Whether its order is its own plan and not the router's.
    ordered: bool = False
    #: What a batch takes to train on, and a sample to load.
    step_s: float = 0.0
    cost_s: float = 0.001
    batch: int = 8
    #: Batches from one checkpoint to the next.
    checkpoint: int = 5
    shards: int | None = 1
    workers: int = 2
    requested: int = 6
    reconnect_timeout_s: float = 100.0
    task_timeout_s: float = 600.0
    #: A store of numbers and the S3 that they lie in, if they are read from there.
    store: str = ""
    endpoint: str = ""

    def dataset(self) -> HeldUp:
        folder = str(Path(self.folder).parent)
        if not self.store:
            return HeldUp(self.size, self.cost_s, folder)
        return Stored(self.size, self.cost_s, folder, store=self.store, endpoint=self.endpoint)

    def sampler(self) -> OwnOrder | None:
        """What plans its order, if it is its own."""
        if not self.ordered:
            return None
        return OwnOrder(range(self.size), num_replicas=1, rank=0, seed=self.number)  # type: ignore[arg-type]


class Journal:
    """What a job has been given, one line for each batch, as of its last checkpoint and since.

    A line holds the epoch, the keys, or "end" after an epoch, and when that was, seconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.epoch = 0
        #: The loader's state at the last checkpoint; None where there was none.
        self.state: dict[str, Any] | None = None
        self._lines = 0
        #: Whether an epoch has been begun and is not over.
        self.midway = False
        saved = folder / "checkpoint"
        if saved.exists():
            self._lines, self.epoch, self.state = json.loads(saved.read_text())
        self._log = self._reopened()

    def _reopened(self) -> TextIO:
        """The log without what came after the checkpoint: that is given anew."""
        path = self._folder / "log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = lines[: self._lines]
        # As a whole: a job that was killed may be killed again while it writes this.
        draft = self._folder / "draft-log"
        draft.write_text("".join(lines))
        os.replace(draft, path)
        self.midway = bool(lines) and json.loads(lines[-1])[1] != "end"
        return open(path, "a")

    def note(self, keys: Any) -> None:
        print(json.dumps([self.epoch, keys, time.monotonic()]), file=self._log, flush=True)
        self._lines += 1
        self.midway = keys != "end"

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint: whole or not at all, whenever the process is killed."""
        draft = self._folder / "draft"
        draft.write_text(json.dumps([self._lines, self.epoch, state]))
        os.replace(draft, self._folder / "checkpoint")


def read(given: Reading) -> None:
    """Train, from the last checkpoint on."""
    torch.manual_seed(given.number)
    sampler = given.sampler()
    loader: DPFlowDataLoader[Any] = DPFlowDataLoader(
        given.dataset(),
        batch_size=given.batch,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=given.workers,
        flow=given.flow,
        address=given.address,
        job=JobOptions(
            idle_s=30.0,
            reconnect_timeout_s=given.reconnect_timeout_s,
            shards=given.shards,
            requested=given.requested,
            policy="alsd",
            task_timeout_s=given.task_timeout_s,
        ),
    )
    journal = Journal(Path(given.folder))
    if journal.state is not None:
        loader.load_state_dict(journal.state)
    enough = Path(given.folder).parent / "enough"
    while journal.midway or journal.epoch < given.epochs or (given.endless and not enough.exists()):
        if sampler is not None:
            sampler.set_epoch(journal.epoch)
        for number, (values, keys) in enumerate(loader, 1):
            assert (values[:, 0] == keys).all(), "a sample is not what its key says"
            journal.note(keys.tolist())
            if number % given.checkpoint == 0:
                journal.save(loader.state_dict())
            time.sleep(given.step_s)
        journal.note("end")
        journal.epoch += 1
        journal.save(loader.state_dict())


def nurse(commands: TextIO, answers: TextIO) -> None:
    """Fork jobs and bury them as lines tell, and end all of them at the end.

    The answers are the process id of a new one and the exit code of a dead one.

    What jobs import has been imported here: one that is killed is back at once. A job keeps its process id until
    it is buried.
    """
    pids: set[int] = set()
    for line in commands:
        command, argument = json.loads(line)
        if command == "bury":
            answer = os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1])
            pids.discard(argument)
        else:
            answer = os.fork()
            if not answer:
                _be_a_job(Reading(**argument))
            pids.add(answer)
        print(answer, file=answers, flush=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_a_job(given: Reading) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.dup2(os.open(Path(given.folder) / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    code = 0
    try:
        read(given)
    except BaseException:
        code = 1
        (Path(given.folder) / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)
