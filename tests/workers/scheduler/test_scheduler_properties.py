"""The scheduler under any interleaving: nothing lost, nothing delivered twice, everything comes to an end."""

import math
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.simulated_fleet import OrderedConsumer, SimulatedFleet
from tests.workers.scheduler.invariants import validate
from torch_dpflow.workers.scheduler import views
from torch_dpflow.workers.scheduler.machine import (
    Assign,
    Deliver,
    Discard,
    IdleWorkers,
    KillWorker,
    Poison,
    Revoke,
    Scheduler,
)

WORKERS = st.integers(0, 3)
MAX_UNANSWERED = views.MAX_UNANSWERED


class Process:
    """A worker as it is: messages on their way to it and from it, a local queue, results not handed in."""

    def __init__(self, worker):
        self.worker = worker
        self.inbox = deque()
        self.outbox = deque()
        self.queue = deque()
        self.running = None
        self.finished = []

    def receive(self):
        instruction = self.inbox.popleft()
        if isinstance(instruction, Assign):
            self.queue.extend(instruction.tasks)
        else:
            self.queue = deque(task for task in self.queue if task not in instruction.tasks)
            if not self.queue and self.running is None:
                self.exchange()

    def start(self):
        self.running = self.queue.popleft()

    def finish(self):
        self.finished.append(self.running)
        self.running = None

    def exchange(self, says_what_runs=False):
        started = self.running if says_what_runs else None
        self.outbox.append((tuple(self.finished), started))
        self.finished = []


class Interleavings(RuleBasedStateMachine):
    """Workers, channels and losses in any order, against sets of what was submitted and what became of it.

    A lost worker may live on unheard ("zombie"): what it sends still arrives, what it is sent does not.
    """

    @initialize(
        window=st.integers(1, 4),
        more=st.integers(0, 3),
        poison_limit=st.integers(1, 3),
        overtake=st.sampled_from([None, 0.0, 2.0]),
        limit=st.sampled_from([None, 0.0, 4.0]),
        workers=st.permutations(range(4)),
        unanswered=st.sampled_from([0, 2, MAX_UNANSWERED]),
    )
    def begin(self, window, more, poison_limit, overtake, limit, workers, unanswered):
        views.MAX_UNANSWERED = unanswered
        #: Most messages to a worker that exchanges nothing: its tasks, and the revocation of each.
        self.most_unanswered = unanswered + 2 * (window + more)
        self.unanswered = Counter()
        self.poison_limit = poison_limit
        self.scheduler = Scheduler(
            window=window,
            max_window=window + more,
            poison_limit=poison_limit,
            overtake_after_s=overtake,
            task_timeout_s=limit,
        )
        self.limit = limit
        #: Who is to be killed, and has not exchanged since.
        self.condemned = set()
        self.now = 0.0
        self.members = {}
        self.zombies = []
        self.pins = {}
        self.delivered = set()
        self.cancelled = set()
        self.poisoned = set()
        self.starved = set()
        self.sent = []
        for worker in workers[1:]:
            self.join(worker, in_flight_arrives=False)

    def tell(self, event, *fields):
        self.now += 1.0
        known_before = self.open_tasks()
        if event in ("exchange", "add_worker"):
            self.unanswered[fields[0]] = 0
        instructions = getattr(self.scheduler, event)(*fields, self.now)
        self.unanswered.update({one.worker for one in instructions if isinstance(one, Assign | Revoke)})
        assert not self.unanswered or max(self.unanswered.values()) <= self.most_unanswered
        for instruction in instructions:
            self.obey(instruction, known_before)
        validate(self.scheduler)

    def obey(self, instruction, known_before):
        match instruction:
            case Assign(worker, tasks):
                assert set(tasks) <= self.open_tasks(), "only unfinished tasks are assigned"
                assert all(self.pins[task] in (None, worker) for task in tasks)
                self.members[worker].inbox.append(instruction)
                self.starved.discard(worker)
            case Revoke(worker, _):
                self.members[worker].inbox.append(instruction)
            case Deliver(task, _):
                assert task in known_before
                assert task not in self.delivered
                self.delivered.add(task)
            case Discard(task, _):
                assert task not in self.open_tasks(), "a first result must not be dropped"
            case KillWorker(worker):
                assert self.limit is not None
                assert worker in self.members.keys() - self.condemned, "one that is there, and once"
                self.condemned.add(worker)
            case Poison(task, workers, late):
                assert task in self.open_tasks()
                assert len(workers) == self.poison_limit >= late
                self.poisoned.add(task)
            case IdleWorkers(workers):
                assert self.starved.isdisjoint(workers), "said once"
                self.starved.update(workers)

    def open_tasks(self):
        return self.pins.keys() - self.delivered - self.cancelled - self.poisoned

    @rule(worker=WORKERS, window=st.integers(1, 9))
    def widen(self, worker, window):
        self.tell("set_window", worker, window)

    @rule(count=st.integers(0, 6), pin=st.one_of(st.none(), st.none(), WORKERS))
    def submit(self, count, pin):
        tasks = range(len(self.pins), len(self.pins) + count)
        self.pins.update(dict.fromkeys(tasks, pin))
        self.tell("submit", tasks, pin)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def cancel(self, data):
        tasks = data.draw(st.lists(st.integers(0, len(self.pins)), max_size=4))
        self.cancelled |= self.open_tasks() & set(tasks)
        self.tell("cancel", tasks)

    @rule(worker=WORKERS, in_flight_arrives=st.booleans())
    def join(self, worker, in_flight_arrives):
        forerunner = self.members.pop(worker, None)
        if forerunner is not None and in_flight_arrives:
            self.zombies.append(forerunner)
        self.starved.discard(worker)
        self.condemned.discard(worker)
        self.members[worker] = Process(worker)
        self.tell("add_worker", worker)

    @rule(worker=WORKERS, lives_on=st.booleans())
    def lose(self, worker, lives_on):
        process = self.members.pop(worker, None)
        if process is not None and lives_on:
            process.inbox.clear()
            self.zombies.append(process)
        self.starved.discard(worker)
        self.condemned.discard(worker)
        self.tell("lose", worker)

    @precondition(lambda self: self.members or self.zombies)
    @rule(random=st.randoms(use_true_random=False), steps=st.integers(1, 30))
    def work(self, random, steps):
        """Let processes do what they could do next, one at a time, in any order."""
        for _ in range(steps):
            moves = self.moves(random.choice([*self.members.values(), *self.zombies]))
            if moves:
                random.choice(moves)()

    @rule(random=st.randoms(use_true_random=False))
    def work_on(self, random):
        """Work twice as often as any other thing happens."""
        if self.members:
            self.work(random, 30)

    def moves(self, process):
        moves = []
        if process.inbox:
            moves.append(process.receive)
        if process.running is None and process.queue:
            moves.append(process.start)
        if process.running is not None:
            moves.append(process.finish)
        if process.finished:
            moves += [process.exchange, lambda: process.exchange(says_what_runs=True)]
        if process.outbox:
            moves.append(lambda: self.arrive(process))
        return moves

    def arrive(self, process):
        finished, started = process.outbox.popleft()
        self.condemned.discard(process.worker)
        self.sent.append((process.worker, finished, started))
        self.tell("exchange", process.worker, finished, started)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), forged=st.integers(0, 3))
    def hear_nonsense(self, data, forged):
        """A message arrives a second time at any later moment, or with results that nobody assigned."""
        worker, finished, started = data.draw(st.sampled_from(self.sent))
        if not forged:
            finished = [data.draw(st.integers(0, len(self.pins)))]
            started = data.draw(st.none() | st.integers(0, len(self.pins)))
        self.condemned.discard(worker)
        self.tell("exchange", worker, finished, started)

    @rule()
    def tick(self):
        self.tell("tick")

    @invariant()
    def books_balance(self):
        counters = self.scheduler.counters
        assert self.scheduler._tasks.keys() == self.open_tasks()
        assert self.scheduler._views.views.keys() == self.members.keys()
        assert counters.submitted == len(self.pins)
        assert counters.delivered == len(self.delivered)
        assert counters.poisoned == len(self.poisoned)

    def teardown(self):
        """Once every worker is there and works, every task comes to its end."""
        views.MAX_UNANSWERED = MAX_UNANSWERED
        if not hasattr(self, "scheduler"):
            return
        for worker in range(4):
            self.join(worker, in_flight_arrives=False)
        rounds = 0
        while self.open_tasks():
            for process in list(self.members.values()):
                if process.inbox:
                    process.receive()
                elif process.queue:
                    process.start()
                    process.finish()
                    process.exchange()
                if process.outbox:
                    self.arrive(process)
            rounds += 1
            assert rounds < 100 + 10 * len(self.pins), f"stuck with {self.open_tasks()}"


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestInterleavings = Interleavings.TestCase


COSTS = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60)


def makespan(costs, *, workers, window, pinned=False):
    """Seconds until all tasks are done that are there from the start."""
    fleet = SimulatedFleet(Scheduler(window=window), workers=workers, cost_s=costs.__getitem__)
    for task in range(len(costs)):
        fleet.submit([task], task % workers if pinned else None)
    seconds = fleet.run()
    assert sorted(fleet.delivered) == list(range(len(costs)))
    return seconds


@given(costs=COSTS, workers=st.integers(1, 8), window=st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_the_makespan_keeps_the_bound_of_list_scheduling(costs, workers, window):
    """Graham 1969: a schedule that never idles beside waiting work takes at most sum/m + (1 - 1/m) max.

    Windows commit tasks to workers early; that the bound holds all the same is what stealing is for.
    """
    bound = sum(costs) / workers + (1 - 1 / workers) * max(costs)
    assert makespan(costs, workers=workers, window=window) <= bound * (1 + 1e-9)


def one_in_a_hundred(tasks, *, seed):
    """Batches of 8 samples of which one in a hundred costs a hundred times the rest."""
    draw = random.Random(seed).random
    return [sum(100.0 if draw() < 0.01 else 1.0 for _ in range(8)) for _ in range(tasks)]


@given(
    windows=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    rounds=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    loses=st.booleans(),
    data=st.data(),
)
def test_many_tasks_are_dealt_as_one_after_the_other(windows, rounds, loses, data):
    def made():
        scheduler = Scheduler(window=6)
        for worker, window in enumerate(windows):
            scheduler.add_worker(worker, 0.0)
            scheduler.set_window(worker, window, 0.0)
        return scheduler

    def held(scheduler):
        return {worker: list(view.held) for worker, view in scheduler._views.views.items()}

    together, singly, first = made(), made(), 0
    for count in rounds:
        tasks = [*range(first, first + count)]
        first += count
        together.submit(tasks, None, 0.0)
        for task in tasks:
            singly.submit([task], None, 0.0)
        assert held(together) == held(singly)
        worker = data.draw(st.integers(0, len(windows) - 1))
        some = held(together)[worker]
        done = some[: data.draw(st.integers(0, len(some)))]
        # The order of the workers of one level decides who gets the next task: it has to be the same too.
        for scheduler in (together, singly):
            if loses:
                scheduler.lose(worker, 0.0)
                scheduler.add_worker(worker, 0.0)
            else:
                scheduler.exchange(worker, done, None, 0.0)
        assert held(together) == held(singly)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("workers", "window"), [(2, 2), (4, 2), (8, 2), (8, 8)])
def test_no_worker_idles_long_on_skewed_costs_where_round_robin_does(seed, workers, window):
    costs = one_in_a_hundred(2_000, seed=seed)
    least = sum(costs) / workers
    dynamic = makespan(costs, workers=workers, window=window)
    static = makespan(costs, workers=workers, window=window, pinned=True)
    assert dynamic <= least + max(costs)
    assert dynamic < static
    assert dynamic / least < 1.05


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("workers", "window"), [(2, 2), (4, 2), (8, 4)])
def test_in_order_consumers_with_bounded_lookahead_wait_less_than_with_round_robin(seed, workers, window):
    costs = one_in_a_hundred(1_000, seed=seed)

    def seconds(round_robin_over):
        fleet = SimulatedFleet(Scheduler(window=window), workers=workers, cost_s=costs.__getitem__, latency_s=0.05)
        consumer = OrderedConsumer(
            fleet, tasks=len(costs), lookahead=4 * workers, step_s=0.1, round_robin_over=round_robin_over
        )
        total = consumer.run()
        assert consumer.consumed == len(costs)
        return total

    assert seconds(None) < 0.98 * seconds(workers)


@given(
    costs=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60),
    killers=st.sets(st.integers(0, 59), max_size=4),
    workers=st.integers(1, 5),
    window=st.integers(1, 6),
    results_per_exchange=st.integers(1, 4),
    latency_s=st.sampled_from([0.0, 0.01, 0.5, 3.0]),
    poison_limit=st.integers(2, 4),
)
@settings(max_examples=300, deadline=None)
def test_the_poison_limit_ends_the_guilty_tasks_and_no_other(
    costs, killers, workers, window, results_per_exchange, latency_s, poison_limit
):
    """Also where results travel late and several at a time, so that the scheduler may blame the wrong one."""
    killers = {task for task in killers if task < len(costs)}
    fleet = SimulatedFleet(
        Scheduler(window=window, poison_limit=poison_limit),
        workers=workers,
        cost_s=lambda task: None if task in killers else costs[task],
        latency_s=latency_s,
        results_per_exchange=results_per_exchange,
        restart_s=latency_s + 1.0,
    )
    fleet.submit(range(len(costs)))
    fleet.run()
    assert sorted(fleet.poisoned) == sorted(killers)
    assert sorted(fleet.delivered) == sorted(set(range(len(costs))) - killers)


@given(
    costs=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40),
    hanging=st.sets(st.integers(0, 39), max_size=4),
    workers=st.integers(1, 4),
    window=st.integers(1, 6),
    results_per_exchange=st.integers(1, 4),
    overtake=st.sampled_from([None, 5.0]),
    poison_limit=st.integers(2, 4),
)
@settings(max_examples=200, deadline=None)
def test_tasks_that_hang_are_given_up_and_all_others_are_delivered_whatever_workers_they_took(
    costs, hanging, workers, window, results_per_exchange, overtake, poison_limit
):
    hanging = {task for task in hanging if task < len(costs)}
    fleet = SimulatedFleet(
        Scheduler(window=window, poison_limit=poison_limit, overtake_after_s=overtake, task_timeout_s=50.0),
        workers=workers,
        cost_s=lambda task: math.inf if task in hanging else costs[task],
        results_per_exchange=results_per_exchange,
    )
    fleet.submit(range(len(costs)))
    for second in range(0, 2000, 5):
        fleet.after(second, lambda: fleet.tell("tick"))
    fleet.run()
    assert sorted(fleet.poisoned) == sorted(hanging)
    assert sorted(fleet.delivered) == sorted(set(range(len(costs))) - hanging)


@given(
    costs=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60),
    workers=st.integers(1, 5),
    window=st.integers(1, 6),
    results_per_exchange=st.integers(1, 4),
    latency_s=st.sampled_from([0.0, 0.5, 3.0]),
)
@settings(max_examples=150, deadline=None)
def test_every_result_is_delivered_or_discarded_and_every_task_delivered_once(
    costs, workers, window, results_per_exchange, latency_s
):
    loaded = Counter()

    def cost_s(task):
        loaded[task] += 1
        return costs[task]

    scheduler = Scheduler(window=window, overtake_after_s=5.0)
    fleet = SimulatedFleet(
        scheduler,
        workers=workers,
        cost_s=cost_s,
        latency_s=latency_s,
        results_per_exchange=results_per_exchange,
    )
    fleet.submit(range(len(costs)))
    for second in range(0, 200, 5):
        fleet.after(second, lambda: fleet.tell("tick"))
    fleet.run()
    assert sorted(fleet.delivered) == list(range(len(costs)))
    assert loaded == Counter(fleet.delivered) + Counter(fleet.discarded)


@given(window=st.integers(1, 8), workers=st.integers(1, 8), tasks=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_no_worker_holds_two_more_than_another_after_a_submit(window, workers, tasks):
    scheduler = Scheduler(window=window)
    held = [0] * workers
    for worker in range(workers):
        scheduler.add_worker(worker, 0.0)
    for task in range(tasks):
        for given_out in scheduler.submit([task], None, 0.0):
            held[given_out.worker] += len(given_out.tasks)
        assert max(held) - min(held) <= 1
