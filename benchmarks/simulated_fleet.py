"""Workers in simulated time that obey a scheduler, and a consumer that wants its tasks in order."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch_dpflow.workers.scheduler.machine import (
    Assign,
    Deliver,
    Discard,
    KillWorker,
    Poison,
    Revoke,
    Scheduler,
    TaskId,
    WorkerId,
)

#: How long a finished result waits for company, at most, seconds.
_LONGEST_HOLD_S = 1.0


class SimulatedFleet:
    """Runs a scheduler against workers whose loading costs simulated time. Deterministic.

    Every message takes `latency_s`. Workers run their local queue in order and exchange after
    `results_per_exchange` results, or when they have nothing left to run.

    Args:
        scheduler: decides; nothing else may use it.
        workers: how many; they join at time 0 under the ids 0, 1, ...
        cost_s: seconds that a task takes, inf: it hangs until its worker is killed; None: it takes that down.
        latency_s: seconds between the scheduler and a worker, one way.
        results_per_exchange: N of the thesis.
        restart_s: seconds from a worker's death until the scheduler hears of it and a replacement has joined.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        workers: int,
        cost_s: Callable[[TaskId], float | None],
        latency_s: float = 0.0,
        results_per_exchange: int = 1,
        restart_s: float = 1.0,
    ) -> None:
        self._scheduler = scheduler
        self._cost_s = cost_s
        self._latency_s = latency_s
        self._results_per_exchange = results_per_exchange
        self._restart_s = restart_s
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._workers = {worker: _SimulatedWorker() for worker in range(workers)}
        #: Seconds since the start.
        self.now = 0.0
        #: Tasks, in the order in which their first results came.
        self.delivered: list[TaskId] = []
        self.discarded: list[TaskId] = []
        self.poisoned: list[TaskId] = []
        #: Called with each task when it is delivered.
        self.on_delivered: Callable[[TaskId], None] = lambda task: None
        for worker in self._workers:
            self.tell("add_worker", worker)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do this `delay_s` seconds from now; at equal times, first come, first served."""
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._ties), action))

    def run(self) -> float:
        """Let time pass until nothing is left to happen; return the time."""
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        return self.now

    def submit(self, tasks: Sequence[TaskId], pinned_to: WorkerId | None = None) -> None:
        """Have tasks loaded."""
        self.tell("submit", tasks, pinned_to)

    def tell(self, event: str, *arguments: Any) -> None:
        """Pass an event to the scheduler, by the name of its method, and carry out what it says."""
        for instruction in getattr(self._scheduler, event)(*arguments, self.now):
            match instruction:
                case Assign() | Revoke():
                    self._send(instruction)
                case Deliver(task, _):
                    self.delivered.append(task)
                    self.on_delivered(task)
                case Discard(task, _):
                    self.discarded.append(task)
                case Poison(task):
                    self.poisoned.append(task)
                case KillWorker(number):
                    self._take_down(number)

    def _send(self, instruction: Assign | Revoke) -> None:
        number, worker = instruction.worker, self._workers[instruction.worker]

        def arrive() -> None:
            if worker.dead:
                return
            if isinstance(instruction, Revoke):
                worker.drop(instruction.tasks)
                return
            worker.waiting.extend(instruction.tasks)
            if worker.running is None:
                self._start_next(number)

        self.after(self._latency_s, arrive)

    def _start_next(self, number: WorkerId) -> None:
        worker = self._workers[number]
        worker.running = worker.waiting.popleft() if worker.waiting else None
        if worker.running is None:
            return
        cost_s = self._cost_s(worker.running)
        if cost_s is None:
            self._take_down(number)
        elif cost_s < math.inf:
            self.after(cost_s, lambda: self._finish(number, worker))
        else:
            # A worker's outbox sends results that have waited for long, also beside user code that hangs.
            self.after(_LONGEST_HOLD_S, lambda: self._hand_in(number, worker))

    def _take_down(self, number: WorkerId) -> None:
        self._workers[number].dead = True
        self.after(self._restart_s, lambda: self._replace(number))

    def _finish(self, number: WorkerId, worker: _SimulatedWorker) -> None:
        if worker.dead:
            return
        assert worker.running is not None
        worker.finished.append(worker.running)
        self._start_next(number)
        full = len(worker.finished) >= self._results_per_exchange
        if not worker.dead and (full or worker.running is None):
            self._exchange(number)

    def _hand_in(self, number: WorkerId, worker: _SimulatedWorker) -> None:
        if not worker.dead and worker.finished:
            self._exchange(number)

    def _replace(self, number: WorkerId) -> None:
        self.tell("lose", number)
        self._workers[number] = _SimulatedWorker()
        self.tell("add_worker", number)

    def _exchange(self, number: WorkerId) -> None:
        worker = self._workers[number]
        finished, worker.finished, started = worker.finished, [], worker.running
        self.after(self._latency_s, lambda: self.tell("exchange", number, finished, started))


class _SimulatedWorker:
    def __init__(self) -> None:
        self.waiting: deque[TaskId] = deque()
        self.running: TaskId | None = None
        #: Results not handed in yet.
        self.finished: list[TaskId] = []
        self.dead = False

    def drop(self, tasks: Sequence[TaskId]) -> None:
        self.waiting = deque(task for task in self.waiting if task not in tasks)


class OrderedConsumer:
    """Consumes tasks 0, 1, ... in this order, as a training loop does; drives a fleet that has not run yet.

    Args:
        fleet: loads the tasks.
        tasks: how many.
        lookahead: how many are submitted and not yet consumed, at most.
        step_s: seconds that consuming one takes.
        round_robin_over: deal the tasks out to so many workers in turn, as torch's loader does; None: let the
            scheduler choose.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        *,
        tasks: int,
        lookahead: int,
        step_s: float = 0.0,
        round_robin_over: int | None = None,
    ) -> None:
        self._fleet = fleet
        self._to_submit = iter(range(tasks))
        self._lookahead = lookahead
        self._step_s = step_s
        self._round_robin_over = round_robin_over
        self._ready: set[TaskId] = set()
        self._busy = False
        #: Tasks consumed, which is the next one that is due.
        self.consumed = 0

    def run(self) -> float:
        """Consume everything; return the seconds until the last step has ended."""
        self._fleet.on_delivered = self._take
        self._submit(self._lookahead)
        return self._fleet.run()

    def _submit(self, count: int) -> None:
        for task in itertools.islice(self._to_submit, count):
            workers = self._round_robin_over
            self._fleet.submit([task], None if workers is None else task % workers)

    def _take(self, task: TaskId) -> None:
        self._ready.add(task)
        # Not at once: the scheduler must not be told anything while its instructions are carried out.
        self._fleet.after(0.0, self._begin_step)

    def _begin_step(self) -> None:
        if self._busy or self.consumed not in self._ready:
            return
        self._ready.remove(self.consumed)
        self.consumed += 1
        self._busy = True
        self._submit(1)
        self._fleet.after(self._step_s, self._end_step)

    def _end_step(self) -> None:
        self._busy = False
        self._begin_step()
