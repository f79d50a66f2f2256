"""Remote workers whose connections break at any time, with what is on its way: no socket, no clock.

`RemoteWorkers`, its fleet, the shard, the scheduler and the workers' loop are the product's. A worker's control
connection is a model, as it is a thread; the loader is the model of `tests/workers/test_workers_under_loss.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.lossy import LossyListener, LossyPlatform
from tests.workers.test_workers_under_loss import BATCHES, WORKERS, LoaderModel
from torch_dpflow.errors import DPFlowError
from torch_dpflow.ipc.messages.headers import PROTOCOL_VERSION, WorkerHandshake, WorkerRefused, decode, encode
from torch_dpflow.ipc.messages.remote_worker import (
    RemoteHandshake,
    RemoteWelcome,
    WorkerGoodbye,
    WorkerHeartbeat,
)
from torch_dpflow.loader.open_batches import OpenBatches
from torch_dpflow.remote.fleet import remote_workers
from torch_dpflow.remote.fleet.content import RemoteContent
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.fleet.worker_states import FleetWorker
from torch_dpflow.remote.shipping.compatibility import versions_here
from torch_dpflow.workers.batch_worker import BatchWorker
from torch_dpflow.workers.scheduler.machine import Scheduler
from torch_dpflow.workers.shard import Shard

VERSIONS = versions_here()
PICK = st.integers(0, 7)


class LossyWorkerListener:
    """In place of `WorkerListener`: a launch spec is the worker's user, and there are no keys."""

    def __init__(self, listen_at: str) -> None:
        self.listener = LossyListener()
        self.addresses = [listen_at]

    def launch_spec(self, worker: FleetWorker, **given: Any) -> bytes:
        return worker.user.encode()

    def keep(self, worker: FleetWorker) -> None:
        pass

    def drop(self, worker: FleetWorker) -> None:
        pass


class RemoteProcess:
    """A remote worker: its control connection, and its loop once it is welcome."""

    def __init__(self, model: RemoteModel, name: str, user: bytes) -> None:
        self.model, self.name, self.user = model, name, user
        self.line = model.listener.connect(user + b"/nonce/line")
        self.links = [self.line.link]
        self.loop: BatchWorker | None = None
        self.is_dead = False
        self.sent = self.received = 0
        self.beat()

    def beat(self) -> None:
        """Send what is due each second."""
        if self.loop is None:
            self.line.send([encode(RemoteHandshake(PROTOCOL_VERSION, VERSIONS))])
        else:
            is_idle = not self.loop._tasks
            self.line.send([encode(WorkerHeartbeat(self.sent, self.received if is_idle else None))])

    def step(self) -> None:
        """Handle what has arrived, and load a batch."""
        while not self.is_dead and (frames := self.line.receive(0)) is not None:
            match decode(frames[0]):
                case RemoteWelcome() if self.loop is None:
                    self.begin()
                case WorkerRefused():
                    self.die()
        if self.loop is not None and not self.is_dead:
            try:
                self.loop.step()
            except DPFlowError as error:
                self.line.send([encode(WorkerGoodbye(str(error), self.sent))])
                self.die()
            if self.loop._stopped:
                self.line.send([encode(WorkerGoodbye("", self.sent))])
                self.die()

    def begin(self) -> None:
        work = self.model.listener.connect(self.user + b"/nonce/work")
        self.links.append(work.link)
        send, receive = work.send, work.receive

        def counted_send(frames: Any) -> None:
            send(frames)
            self.sent += 1

        def counted_receive(timeout_s: float | None) -> Any:
            frames = receive(timeout_s)
            self.received += frames is not None
            return frames

        work.send, work.receive = counted_send, counted_receive  # type: ignore[method-assign]
        number, _, incarnation = self.user.partition(b"/")
        self.loop = BatchWorker(self.model.spec, int(number), int(incarnation), work)
        self.loop.begin()

    def die(self) -> None:
        self.is_dead = True
        for link in self.links:
            link.down.clear()
            link.arrived.clear()
            link.is_open, link.is_closed = False, True
        self.model.listener.losses += 1
        self.model.platform.end(self.name)


class RemoteModel(LoaderModel):
    """The loader's model with workers of a platform; as `RemoteShard`, also the shell of `RemoteWorkers`."""

    def __init__(self, *, in_order: bool, own_stream: bool) -> None:
        self.now = 0.0
        self.live: list[RemoteProcess] = []
        super().__init__(in_order=in_order, own_stream=own_stream, queue_messages=1000)

    def make_workers(self) -> None:
        self.patches.enter_context(patch.object(remote_workers, "WorkerListener", LossyWorkerListener))
        self.patches.enter_context(patch.object(remote_workers, "SuspendAwareClock", lambda: lambda: self.now))
        self.patches.enter_context(patch.object(remote_workers, "SystemRandom", lambda: Random(1)))
        self.platform = LossyPlatform()
        self.remote = RemoteWorkers(self.platform, RemoteContent(b"content"), WORKERS)
        self.remote.shell = self
        listener: Any = self.remote.listener
        self.listener = listener
        self.scheduler = Scheduler(window=2, max_window=8, poison_limit=1 << 30)
        self.shard = Shard(self.remote, self.scheduler, self, clock=lambda: self.now)
        self.open_batches = OpenBatches(WORKERS, self.shard.submit, self.shard.cancel, self.arrived)
        self.commands = deque()
        self.remote.shard = self.shard
        self.remote.start_all()

    # -- of the remote workers (`Shell`) -----------------------------------------------------------------

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        if had_tasks:
            self.shard.on_worker_lost(worker, may_blame=may_blame)

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)

    # -- of the shard ------------------------------------------------------------------------------------

    def refusal(self, handshake: WorkerHandshake) -> str:
        return self.remote.refusal(handshake.worker, handshake.incarnation)

    def failed(self, worker: int, why: str = "") -> None:
        self.remote.kill(worker, why)

    # -- steps -------------------------------------------------------------------------------------------

    def receive(self) -> None:
        while (message := self.listener.receive(0)) is not None:
            self.remote.on_message(*message)

    def start(self) -> None:
        """Let the platform start what is requested, and end what is to be ended."""
        for name in [*self.platform.requested]:
            self.live.append(RemoteProcess(self, name, self.platform.accept(name)))
        for name in [*self.platform.stopped]:
            del self.platform.stopped[name]
            for process in self.live:
                if process.name == name and not process.is_dead:
                    process.die()
        self.live = [one for one in self.live if not one.is_dead or any(link.up for link in one.links)]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for process in self.live:
            if not process.is_dead:
                process.beat()
        self.remote.look()

    def deliver_all(self) -> None:
        for process in [*self.live]:
            for link in [*process.links]:
                link.deliver_down(1 << 30)
                self.listener.deliver_up(link.identity, 1 << 30)
            self.receive()

    def finish(self) -> None:
        for _ in range(20 * BATCHES):
            for process in self.live:
                for link in process.links:
                    link.reconnect()
            self.start()
            self.deliver_all()
            for process in [*self.live]:
                process.step()
            self.deliver_all()
            self.pass_time(1.0)
            self.read()
            if self.is_over:
                return
        missing = sorted(set(range(self.submitted)) - self.results.keys())
        raise AssertionError(f"batches {missing} never come: {self.remote.views()}")


class RemoteWorkersUnderLoss(RuleBasedStateMachine):
    """Connections that break with what is on its way, workers that die, epochs that begin: at any time."""

    @initialize(in_order=st.booleans(), own_stream=st.booleans(), works=st.booleans())
    def begin(self, in_order: bool, own_stream: bool, works: bool) -> None:
        self.model = RemoteModel(in_order=in_order, own_stream=own_stream)
        while works and self.model.remote.working < WORKERS:
            self.work(times=1)
            self.model.pass_time(0.3)

    def picked(self, number: int) -> RemoteProcess | None:
        return self.model.live[number % len(self.model.live)] if self.model.live else None

    @rule()
    def start(self) -> None:
        self.model.start()

    @rule()
    def begin_epoch(self) -> None:
        self.model.begin_epoch()

    @rule(number=PICK, link=st.integers(0, 1), up=st.booleans(), count=st.integers(1, 3))
    def deliver(self, number: int, link: int, up: bool, count: int) -> None:
        process = self.picked(number)
        if process is not None:
            chosen = process.links[link % len(process.links)]
            if up:
                self.model.listener.deliver_up(chosen.identity, count)
                self.model.receive()
            else:
                chosen.deliver_down(count)

    @rule(number=PICK, times=st.integers(1, 4))
    def step(self, number: int, times: int) -> None:
        process = self.picked(number)
        for _ in range(times if process is not None else 0):
            assert process is not None
            process.step()

    @rule(times=st.integers(1, 3))
    def work(self, times: int) -> None:
        """Let all workers start and work, undisturbed."""
        for _ in range(times):
            self.model.start()
            self.model.deliver_all()
            for process in [*self.model.live]:
                process.step()
            self.model.remote.look()
            self.model.read()

    @rule(number=PICK, link=st.integers(0, 1), returns=st.booleans(), before=st.sampled_from(["", "work", "epoch"]))
    def reset(self, number: int, link: int, returns: bool, before: str) -> None:
        """Break a connection, at once or while the next tasks or the beginning of an epoch are on their way."""
        if before == "work":
            self.work(times=1)
        elif before == "epoch":
            self.model.begin_epoch()
        process = self.picked(number)
        if process is not None and not process.is_dead:
            chosen = process.links[link % len(process.links)]
            self.model.listener.reset(chosen.identity)
            if returns:
                chosen.reconnect()

    @rule(number=PICK)
    def die(self, number: int) -> None:
        process = self.picked(number)
        if process is not None and process.loop is not None and not process.is_dead:
            process.die()

    @rule(seconds=st.sampled_from([0.3, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.model.pass_time(seconds)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            try:
                self.model.finish()
            finally:
                self.model.close()


TestRemoteWorkersUnderLoss = RemoteWorkersUnderLoss.TestCase
TestRemoteWorkersUnderLoss.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


#: Seconds of the model's clock in which the workers recover from a loss: a lease of 10 s, and a start.
WITHIN_S = 40.0


@pytest.fixture
def model() -> Iterator[RemoteModel]:
    made = RemoteModel(in_order=True, own_stream=False)
    yield made
    made.close()


def test_the_first_tasks_of_workers_are_lost_with_their_connections(model: RemoteModel) -> None:
    """The connections are there again at once, so that no message is refused."""
    while model.remote.working < WORKERS:
        model.start()
        model.deliver_all()
        for process in model.live:
            process.step()
        model.pass_time(0.3)
    for process in model.live:
        work = process.links[1]
        assert work.down
        model.listener.reset(work.identity)
        work.reconnect()
    model.finish()
    assert model.now < WITHIN_S


def test_a_handshake_is_lost_with_its_connection(model: RemoteModel) -> None:
    """The worker is connected and never ready: it is replaced, and not the one that works."""
    model.start()
    for _ in range(2):
        model.deliver_all()  # their handshakes, and the answers
    late = model.live[1]
    late.step()
    assert late.links[1].up
    model.listener.reset(late.links[1].identity)
    late.links[1].reconnect()
    model.finish()
    while model.remote.working < WORKERS:
        assert model.now < WITHIN_S
        model.start()
        model.deliver_all()
        for process in [*model.live]:
            process.step()
        model.pass_time(1.0)
    assert late.is_dead
    assert model.live[0].user == b"0/1", "the first works on"
