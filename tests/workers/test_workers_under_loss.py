"""A private loader's workers where messages are late or refused and workers die at any time: no socket, no clock.

The shard, the scheduler and the workers' loop are the product's. The loader around them is a model: it begins epochs,
holds a few batches in flight and replaces workers that have died. Every batch must have the numbers of its epoch,
and must arrive once messages arrive again.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.lossy import LossyConnection, LossyListener
from torch_dpflow._core.stage_clock import StageClock
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.errors import DPFlowError
from torch_dpflow.ipc.messages.headers import BATCH, OPENED, UNFIT, EpochBegin, Finished, WorkerHandshake
from torch_dpflow.ipc.messages.headers import decode as header
from torch_dpflow.ipc.serialization.codec import decode, encode
from torch_dpflow.loader.open_batches import PIECE_S, OpenBatches, Opening
from torch_dpflow.workers import batch_worker
from torch_dpflow.workers.batch_pieces import (
    UNDIVIDED,
    BatchPiece,
    Lender,
    OpenedBatch,
    generation_of,
    part_of,
    position_of,
    task_of,
)
from torch_dpflow.workers.batch_worker import BatchWorker
from torch_dpflow.workers.batches import Begun, EpochSpec, LoadedBatch, LoadSpec
from torch_dpflow.workers.scheduler.machine import Scheduler
from torch_dpflow.workers.shard import Shard

BATCHES, WORKERS = 12, 2
NUMBERS = st.integers(0, WORKERS - 1)


class NumberedBatches:
    """In place of the user's code: a batch is its epoch, its position and its index."""

    def __init__(self, spec: LoadSpec, worker: int, clock: StageClock) -> None:
        self.spec, self.clock = spec, clock
        self.epoch: EpochSpec | None = None

    def begin(self, epoch: EpochSpec) -> Begun | None:
        self.epoch = epoch
        return Begun(generation=epoch.generation, stream=None, failure=None) if self.spec.own_stream else None

    def share(self, *arguments: Any) -> None:
        pass

    def load(self, task: int, index: Any) -> LoadedBatch:
        assert self.epoch is not None
        self.clock.add_sample(1.0, 0.0, 0.0)
        if isinstance(index, BatchPiece):
            return self.load_rows(task, index)
        if isinstance(index, list):  # opened before, and to be loaded as a whole
            index = index[0]
        if not self.spec.divides or part_of(task) or index % 4 == 3:
            return LoadedBatch(BATCH, (self.epoch.epoch, position_of(task), index), None)
        number = len(BLOCKS)
        BLOCKS.append(Block(number, {0}))
        # Of eight rows, each of which takes the time of a piece.
        opened = OpenedBatch(
            (self.epoch.epoch, position_of(task), number), [index] * 8, 1, [], 7 * PIECE_S, Lender(0, 0, 0)
        )
        return LoadedBatch(OPENED, encode(opened), None)

    def load_rows(self, task: int, piece: BatchPiece) -> LoadedBatch:
        epoch, position, number = decode(piece.table, [piece.head]).value
        assert self.epoch is not None
        assert (epoch, position) == (self.epoch.epoch, position_of(task)), "another epoch's numbers"
        if piece.indices[0] % 4 == 2 and piece.begin > 4:
            return LoadedBatch(UNFIT, piece.indices[0] % 1000 != 10, None)
        if not BLOCKS[number].is_open:
            return LoadedBatch(UNFIT, True, None)
        BLOCKS[number].rows.update(range(piece.begin, piece.begin + len(piece.indices)))
        return LoadedBatch(BATCH, True, None)


@dataclass
class Block:
    """The memory of an opened batch: the rows that were written."""

    number: int
    rows: set[int]
    is_open: bool = True

    def end_writing(self) -> bool:
        """Fails for some blocks, as if a worker were writing."""
        assert self.rows == {*range(8)}, "a batch ends before all of its rows are written"
        self.is_open = False
        return self.number % 5 != 4


#: Of this process, in which all workers are.
BLOCKS: list[Block] = []


def load_spec(*, own_stream: bool, divides: bool) -> LoadSpec:
    return LoadSpec(
        dataset=None,
        dataset_kind=0,
        auto_collation=True,
        collate_fn=len,
        drop_last=False,
        batch_size=1,
        worker_init_fn=None,
        num_workers=WORKERS,
        base_seed=0,
        own_stream=own_stream,
        divides=divides,
        read_threads=1,
        shared_memory=0,
    )


class Process:
    """A worker's process: its loop, which the test steps."""

    def __init__(self, spec: LoadSpec, number: int, incarnation: int, connection: LossyConnection) -> None:
        self.connection = connection
        self.incarnation = incarnation
        self.error: Exception | None = None
        self.is_dead = False
        self.loop = BatchWorker(spec, number, incarnation, connection)
        self.loop.begin()

    def step(self) -> None:
        if not self.is_dead:
            try:
                self.loop.step()
            except DPFlowError as error:
                self.error = error
                self.die()

    def die(self) -> None:
        self.is_dead = True
        self.connection.close()


class LoaderModel:
    """The loader around a shard: as `WorkerIterator` and `PrivateShard`, in one thread. Also the shard's requester."""

    def __init__(self, *, in_order: bool, own_stream: bool, queue_messages: int, divides: bool = False) -> None:
        self.in_order, self.own_stream = in_order, own_stream
        BLOCKS.clear()
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(batch_worker, "BatchSource", NumberedBatches))
        self.patches.enter_context(patch.object(batch_worker, "use_sched_batch", lambda: None))
        self.patches.enter_context(patch.object(batch_worker, "let_fill", lambda *_: None))
        self.spec = load_spec(own_stream=own_stream, divides=divides and not own_stream)
        self.queue_messages = queue_messages
        self.generation = self.replaced = 0
        self.begin_reading()
        self.make_workers()
        self.submit()

    def make_workers(self) -> None:
        """Make the shard and its workers."""
        self.listener = LossyListener(self.queue_messages)
        self.scheduler = Scheduler(window=2, poison_limit=1 << 30)
        self.shard = Shard(self.listener, self.scheduler, self, clock=lambda: 0.0)
        self.open_batches = OpenBatches(WORKERS, self.shard.submit, self.shard.cancel, self.arrived)
        self.commands: deque[Callable[[], None]] = deque()
        self.processes = [self.started(number, 0) for number in range(WORKERS)]

    def close(self) -> None:
        self.patches.close()

    # -- the loader --------------------------------------------------------------------------------------

    def begin_reading(self) -> None:
        self.results: dict[int, Any] = {}
        self.submitted = self.given = 0
        self.unreported = set(range(WORKERS)) if self.own_stream else set()

    def begin_epoch(self) -> None:
        self.generation += 1
        self.begin_reading()
        self.open_batches.clear()
        self.shard.begin_epoch()
        self.submit()

    def submit(self) -> None:
        while self.submitted < min(BATCHES, self.given + 2 * WORKERS):
            position = self.submitted
            self.submitted += 1
            task = task_of(self.generation, position, 0 if self.open_batches.opens else UNDIVIDED)
            pinned_to = position % WORKERS if self.own_stream else None
            self.shard.submit([(task, pickle.dumps(self.index(position)))], pinned_to=pinned_to)

    def index(self, position: int) -> int:
        return 1000 * self.generation + position

    def read(self) -> None:
        """Take the batches that have arrived."""
        while (self.given in self.results) if self.in_order else (self.given < len(self.results)):
            self.given += 1
        self.submit()

    @property
    def is_over(self) -> bool:
        return self.given == BATCHES and not self.unreported

    # -- processes ---------------------------------------------------------------------------------------

    def started(self, number: int, incarnation: int) -> Process:
        return Process(self.spec, number, incarnation, self.listener.connect(f"{number}/{incarnation}".encode()))

    def notice(self, number: int) -> None:
        """Replace a worker that has died, after its last messages."""
        process = self.processes[number]
        if process.is_dead:
            self.listener.deliver_up(process.connection.identity, 1 << 30)
            self.receive()
            self.shard.on_worker_lost(number, may_blame=False)
            self.receive()
            self.replaced += 1
            self.processes[number] = self.started(number, process.incarnation + 1)

    def receive(self) -> None:
        while (message := self.listener.receive(0)) is not None:
            self.shard.on_message(*message)
        while self.commands:
            self.commands.popleft()()

    # -- of the shard (`Requester`) ----------------------------------------------------------------------

    def refusal(self, handshake: WorkerHandshake) -> str:
        latest = self.processes[handshake.worker].incarnation
        return "" if handshake.incarnation == latest else f"its present incarnation is {latest}"

    def admitted(self, handshake: WorkerHandshake, *, shares_memory: bool) -> None:
        assert not shares_memory

    def epoch_for(self, worker: int) -> bytes:
        spec = EpochSpec(
            epoch=10 + self.generation, base_seed=0, shared_seed=None, stream=None, generation=self.generation
        )
        return pickle.dumps(spec)

    def begun(self, worker: int, frame: memoryview) -> None:
        if pickle.loads(frame).generation == self.generation:
            self.unreported.discard(worker)

    def timed(self, worker: int, times: StageTimes) -> None:
        assert times.dataset_s == times.samples

    def open(self, worker: int, reader: object, finished: Finished, payloads: list[list[memoryview]]) -> list[Any]:
        return [decode(finished.payload, frames) for frames in payloads]

    def delivered(self, task: int, worker: int, finished: Finished, opened: Any) -> None:
        assert generation_of(task) == self.generation, "a batch of an earlier epoch"
        if finished.kind == OPENED:
            block = BLOCKS[opened.value[2]]
            head = encode(opened)[1][0]
            opening = Opening(opened, finished.payload, head, block.end_writing)
            self.commands.append(partial(self.add, task, opening))
        elif part_of(task) not in (0, UNDIVIDED):
            self.commands.append(partial(self.open_batches.finish, task, finished.kind, opened))
        else:
            self.arrived(task - part_of(task), finished.kind, opened)

    def add(self, task: int, opening: Opening) -> None:
        if generation_of(task) == self.generation:
            self.open_batches.add(task, opening)

    def arrived(self, task: int, kind: int, value: Any, size: int = 0) -> None:
        epoch, position = 10 + self.generation, position_of(task)
        assert (generation_of(task), part_of(task), kind) == (self.generation, 0, BATCH)
        assert position not in self.results
        whole = value == (epoch, position, self.index(position))
        assert whole or (value[:2] == (epoch, position) and BLOCKS[value[2]].rows == {*range(8)}), "other numbers"
        self.results[position] = value

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        raise AssertionError("no task kills workers here")

    def starved(self) -> None:
        pass

    def failed(self, worker: int, why: str = "") -> None:
        self.processes[worker].die()

    def overdue(self, worker: int) -> None:
        raise AssertionError("there is no time limit")

    # -- in the end --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let everything arrive; the epoch must come to its end, whatever happened before."""
        for _ in range(20 * BATCHES):
            for number, process in enumerate(self.processes):
                process.connection.link.deliver_down(1 << 30)
                process.step()
                self.listener.deliver_up(process.connection.identity, 1 << 30)
                self.receive()
                self.notice(number)
            self.read()
            if self.is_over:
                return
        missing = sorted(set(range(self.submitted)) - self.results.keys())
        raise AssertionError(f"batches {missing} never come; workers {self.unreported} never begin")


class WorkersUnderLoss(RuleBasedStateMachine):
    """Epochs that are begun at any time, with messages in any order and queues that are soon full."""

    @initialize(
        in_order=st.booleans(),
        kind=st.sampled_from(["own stream", "divides", "whole"]),
        queue_messages=st.sampled_from([3, 8, 1000]),
    )
    def begin(self, in_order: bool, kind: str, queue_messages: int) -> None:
        self.loader = LoaderModel(
            in_order=in_order,
            own_stream=kind == "own stream",
            divides=kind == "divides",
            queue_messages=queue_messages,
        )

    @rule(times=st.integers(1, 5))
    def begin_epochs(self, times: int) -> None:
        for _ in range(times):
            self.loader.begin_epoch()

    @rule(number=NUMBERS, count=st.integers(1, 4))
    def deliver_down(self, number: int, count: int) -> None:
        self.loader.processes[number].connection.link.deliver_down(count)

    @rule(number=NUMBERS, count=st.integers(1, 4))
    def deliver_up(self, number: int, count: int) -> None:
        self.loader.listener.deliver_up(self.loader.processes[number].connection.identity, count)
        self.loader.receive()

    @rule(number=NUMBERS)
    def step(self, number: int) -> None:
        self.loader.processes[number].step()

    @rule(number=NUMBERS, times=st.integers(1, 8))
    def one_worker_works(self, number: int, times: int) -> None:
        """Let a worker load while the other does nothing: the other sits in one sample."""
        for _ in range(times):
            self.deliver_down(number, 8)
            self.step(number)
            self.deliver_up(number, 8)
            self.loader.read()

    @precondition(lambda self: self.loader.replaced < 20)
    @rule(number=NUMBERS)
    def die(self, number: int) -> None:
        self.loader.processes[number].die()

    @rule(number=NUMBERS)
    def notice(self, number: int) -> None:
        self.loader.notice(number)

    @rule()
    def read(self) -> None:
        self.loader.read()

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            try:
                self.loader.finish()
            finally:
                self.loader.close()


TestWorkersUnderLoss = WorkersUnderLoss.TestCase
TestWorkersUnderLoss.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def loader(request: pytest.FixtureRequest) -> Iterator[LoaderModel]:
    model = LoaderModel(**{"in_order": True, "own_stream": False, "queue_messages": 1000, **request.param})
    for number, process in enumerate(model.processes):
        model.listener.deliver_up(process.connection.identity)
        model.receive()
        process.connection.link.deliver_down()
        process.step()
        model.listener.deliver_up(process.connection.identity, 8)  # ready, where it says so, and its beginning
        model.receive()
        assert number in model.shard.connected
    yield model
    model.close()


@pytest.mark.parametrize("loader", [{}, {"own_stream": True}], indirect=True)
def test_epochs_begun_while_a_worker_sits_in_one_sample_do_not_fill_its_queue(loader: LoaderModel) -> None:
    """A step-based script takes a batch of each of a thousand epochs, and reads the last of them to its end."""
    for _ in range(1000):
        for _ in range(3):
            loader.processes[0].connection.link.deliver_down(8)
            loader.processes[0].step()
            loader.listener.deliver_up(b"0/0", 8)
            loader.receive()
        loader.begin_epoch()
    assert not loader.listener.refused
    loader.finish()
    assert not loader.replaced


@pytest.mark.parametrize("loader", [{"in_order": False}], indirect=True)
def test_a_task_is_not_stolen_and_replaced_without_bound(loader: LoaderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an order, one worker loads thousands of batches while the other sits in one sample."""
    monkeypatch.setattr("tests.workers.test_workers_under_loss.BATCHES", 5000)
    while loader.given < 4990:
        loader.processes[0].connection.link.deliver_down(8)
        for _ in range(2):  # all that it has, so that it is idle and steals
            loader.processes[0].step()
        loader.listener.deliver_up(b"0/0", 8)
        loader.receive()
        loader.read()
    assert not loader.listener.refused
    loader.finish()
    assert not loader.replaced


@pytest.mark.parametrize("loader", [{}, {"own_stream": True}], indirect=True)
def test_a_worker_does_not_load_what_belongs_to_an_epoch_that_it_was_not_sent(loader: LoaderModel) -> None:
    """Even where a transport loses one message and delivers the next."""
    loader.begin_epoch()
    process = loader.processes[1]
    (lost,) = (message for message in process.connection.link.down if isinstance(header(message[0]), EpochBegin))
    process.connection.link.down.remove(lost)
    process.connection.link.deliver_down(8)
    process.step()
    assert "a message of the shard was lost" in str(process.error)
    loader.finish()
    assert loader.replaced == 1
