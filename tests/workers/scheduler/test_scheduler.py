"""The scheduler, event by event: what it is told and what it answers."""

import math
import pickle
from functools import partial
from operator import methodcaller

import pytest

from tests.workers.scheduler.invariants import validate
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.workers.scheduler.machine import (
    Assign,
    Deliver,
    Discard,
    IdleWorkers,
    Poison,
    Revoke,
    Scheduler,
)


def told(scheduler, *events):
    """Tell the scheduler these events; return what it answers to the last."""
    for event in events:
        instructions = event(scheduler)
        validate(scheduler)
    return instructions


def submit(*tasks, to=None, now=0.0):
    return methodcaller("submit", tasks, to, now)


def finish(worker, *tasks, started=None, now=0.0):
    return methodcaller("exchange", worker, tasks, started, now)


add_worker, cancel, lose, tick = (partial(methodcaller, name) for name in ("add_worker", "cancel", "lose", "tick"))


class TestWindows:
    def test_a_window_is_filled_with_the_oldest_tasks_when_a_worker_joins(self):
        scheduler = Scheduler(window=3)
        assert told(scheduler, submit(1, 2, 3, 4), add_worker(0, 0.0)) == [Assign(0, [1, 2, 3])]

    def test_a_result_makes_room_for_one_task(self):
        scheduler = Scheduler(window=2)
        assert told(scheduler, submit(1, 2, 3), add_worker(0, 0.0), finish(0, 1)) == [
            Deliver(1, 0),
            Assign(0, [3]),
        ]

    def test_a_worker_cannot_run_what_it_has_finished(self):
        scheduler = Scheduler(window=2, poison_limit=1)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0), finish(0, 1, started=1))
        assert told(scheduler, lose(0, 0.0)) == [Poison(2, (0,))]

    def test_several_results_make_room_for_several_tasks(self):
        scheduler = Scheduler(window=3)
        answer = told(scheduler, submit(*range(9)), add_worker(0, 0.0), finish(0, 0, 1))
        assert answer == [Deliver(0, 0), Deliver(1, 0), Assign(0, [3, 4])]

    def test_hungry_workers_get_one_task_each_before_any_gets_two(self):
        scheduler = Scheduler(window=4)
        answer = told(scheduler, add_worker(0, 0.0), add_worker(1, 0.0), add_worker(2, 0.0), submit(1, 2, 3, 4))
        assert answer == [Assign(0, [1, 4]), Assign(1, [2]), Assign(2, [3])]

    @pytest.mark.parametrize("held", [0, 1, 3])
    def test_tasks_given_together_are_those_given_one_by_one(self, held):
        given = []
        for groups in ([[*range(10, 20)]], [[task] for task in range(10, 20)]):
            scheduler = Scheduler(window=6)
            told(scheduler, add_worker(0, 0.0), submit(*range(held)), add_worker(1, 0.0))
            windows = {0: [], 1: []}
            for group in groups:
                for one in told(scheduler, submit(*group)):
                    windows[one.worker] += one.tasks
            given.append(windows)
        assert given[0] == given[1]

    def test_a_new_task_goes_to_the_emptiest_window(self):
        scheduler = Scheduler(window=3)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, submit(3)) == [Assign(0, [3])]
        assert told(scheduler, submit(4)) == [Assign(1, [4])]

    def test_submitting_nothing_is_nothing(self):
        assert told(Scheduler(window=1), add_worker(0, 0.0), submit()) == []


class TestPinning:
    def test_pinned_tasks_run_only_on_their_worker(self):
        scheduler = Scheduler(window=2)
        told(scheduler, add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, submit(1, 2, 3, to=1)) == [Assign(1, [1, 2])]
        assert told(scheduler, finish(1, 1)) == [Deliver(1, 1), Assign(1, [3])]

    def test_they_come_before_the_global_queue(self):
        scheduler = Scheduler(window=2)
        assert told(scheduler, submit(1), submit(2, to=0), add_worker(0, 0.0)) == [Assign(0, [2, 1])]

    def test_they_wait_for_a_worker_that_has_not_joined(self):
        scheduler = Scheduler(window=2)
        assert told(scheduler, add_worker(0, 0.0), submit(1, to=7)) == []
        assert told(scheduler, add_worker(7, 0.0)) == [Assign(7, [1])]

    def test_a_replacement_under_the_same_id_gets_them_in_order(self):
        scheduler = Scheduler(window=2)
        told(scheduler, add_worker(0, 0.0), add_worker(1, 0.0), submit(1, 2, 3, to=1))
        assert told(scheduler, lose(1, 0.0)) == []
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [1])]  # runs alone: its forerunner died of it?
        assert told(scheduler, finish(1, 1)) == [Deliver(1, 1), Assign(1, [2, 3])]

    def test_one_that_may_have_killed_waits_until_its_worker_is_empty(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2, 3, to=0), add_worker(0, 0.0), finish(0, started=2), lose(0, 0.0))
        assert told(scheduler, add_worker(0, 0.0)) == [Assign(0, [1])]
        assert told(scheduler, finish(0, 1)) == [Deliver(1, 0), Assign(0, [2])]

    def test_what_waits_behind_it_goes_on_when_it_is_cancelled(self):
        scheduler = Scheduler(window=2)
        told(
            scheduler,
            submit(1, 2, 3, to=0),
            add_worker(0, 0.0),
            finish(0, started=2),
            lose(0, 0.0),
            add_worker(0, 0.0),
        )
        assert told(scheduler, cancel([2], 0.0)) == [Assign(0, [3])]

    def test_another_worker_cannot_be_their_victim(self):
        scheduler = Scheduler(window=2, poison_limit=1)
        told(scheduler, submit(1, to=0), add_worker(0, 0.0), add_worker(1, 0.0), finish(1, started=1))
        assert told(scheduler, lose(1, 0.0)) == []

    def test_they_are_not_stolen_but_what_waits_behind_them_is(self):
        scheduler = Scheduler(window=3)
        told(scheduler, add_worker(0, 0.0), submit(1, 2, to=0), submit(3))
        assert told(scheduler, add_worker(1, 0.0)) == [Revoke(0, [3]), Assign(1, [3])]
        assert told(scheduler, finish(1, 3)) == [Deliver(3, 1), IdleWorkers([1])]

    def test_they_fill_the_room_that_a_theft_leaves(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1), submit(2), add_worker(0, 0.0), submit(3, to=0))
        assert told(scheduler, add_worker(1, 0.0)) == [Revoke(0, [2]), Assign(0, [3]), Assign(1, [2])]


class TestStealing:
    def test_an_idle_worker_takes_the_last_task_of_the_longest_mirror(self):
        scheduler = Scheduler(window=3)
        told(scheduler, submit(1, 2, 3, 4, 5), add_worker(0, 0.0), add_worker(1, 0.0))  # 0: 1 2 3, 1: 4 5
        assert told(scheduler, add_worker(2, 0.0)) == [Revoke(0, [3]), Assign(2, [3])]

    def test_among_equally_long_ones_it_takes_from_the_one_that_has_been_stuck_longest(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2, 3, 4, 5), add_worker(0, 0.0), add_worker(1, 0.0))  # 0: 1 2, 1: 3 4
        told(scheduler, finish(0, 1, now=5.0))  # 0: 2 5
        assert told(scheduler, add_worker(2, 6.0)) == [Revoke(1, [4]), Assign(2, [4])]

    def test_what_is_believed_running_is_not_stolen(self):
        scheduler = Scheduler(window=2)
        assert told(scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0)) == [IdleWorkers([1])]

    def test_a_worker_is_believed_to_run_what_it_says(self):
        scheduler = Scheduler(window=3)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0), finish(0, started=3))
        assert told(scheduler, add_worker(1, 0.0)) == [IdleWorkers([1])]

    def test_a_busy_worker_does_not_steal(self):
        scheduler = Scheduler(window=3)
        told(scheduler, submit(1, 2, 3, 4, 5, 6), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, finish(1, 4, 5)) == [Deliver(4, 1), Deliver(5, 1)]

    def test_the_queue_comes_before_stealing(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0))
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [3])]

    def test_a_stolen_task_that_had_been_started_is_delivered_once(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), add_worker(1, 0.0))  # 1 has stolen 2
        assert told(scheduler, finish(0, 1, 2)) == [
            Deliver(1, 0),
            Deliver(2, 0),
            Revoke(1, [2]),
            IdleWorkers([0]),
        ]
        assert told(scheduler, finish(1, 2)) == [Discard(2, 1), IdleWorkers([1])]
        assert scheduler.counters.duplicates == 1

    def test_a_worker_that_runs_what_was_stolen_from_it_is_busy(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, finish(0, 1, started=2)) == [Deliver(1, 0)]
        assert told(scheduler, finish(0, 2)) == [Deliver(2, 0), Revoke(1, [2]), IdleWorkers([0])]

    def test_a_starved_worker_takes_what_turns_out_to_wait(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, finish(0, started=99)) == [Revoke(0, [1]), Assign(1, [1])]

    def test_a_starved_worker_takes_what_waits_behind_a_cancelled_task(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), finish(0, started=2), add_worker(1, 0.0))
        assert told(scheduler, cancel([2], 0.0)) == [Revoke(0, [2, 1]), Assign(1, [1])]

    def test_a_starved_worker_takes_a_copied_task_that_has_lost_its_copy(self):
        scheduler = Scheduler(window=2, overtake_after_s=1.0)
        told(
            scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0), add_worker(2, 0.0), tick(1.0)
        )  # 1 has a copy
        told(scheduler, finish(0, started=99))
        assert told(scheduler, lose(1, 0.0)) == [Revoke(0, [1]), Assign(2, [1])]


class TestStarvation:
    def test_it_is_told_once(self):
        scheduler = Scheduler(window=2)
        assert told(scheduler, add_worker(0, 0.0)) == [IdleWorkers([0])]
        assert told(scheduler, finish(0)) == []
        assert told(scheduler, tick(1.0)) == []

    def test_it_is_told_again_after_work(self):
        scheduler = Scheduler(window=2)
        assert told(scheduler, add_worker(0, 0.0), submit(1)) == [Assign(0, [1])]
        assert told(scheduler, finish(0, 1)) == [Deliver(1, 0), IdleWorkers([0])]


class TestCancelling:
    def test_queued_tasks_vanish(self):
        scheduler = Scheduler(window=1)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0))
        assert told(scheduler, cancel([2], 0.0)) == []
        assert told(scheduler, finish(0, 1)) == [Deliver(1, 0), Assign(0, [3])]

    def test_held_tasks_are_revoked_and_the_window_is_filled(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0))
        assert told(scheduler, cancel([2], 0.0)) == [Revoke(0, [2]), Assign(0, [3])]

    def test_a_cancelled_task_occupies_its_worker_until_the_worker_exchanges(self):
        scheduler = Scheduler(window=1)
        told(scheduler, submit(1, 2), add_worker(0, 0.0))
        assert told(scheduler, cancel([1], 0.0)) == [Revoke(0, [1])]
        assert told(scheduler, finish(0, 1)) == [Discard(1, 0), Assign(0, [2])]

    def test_a_worker_that_had_not_started_it_says_so_by_an_empty_exchange(self):
        scheduler = Scheduler(window=1)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), cancel([1], 0.0))
        assert told(scheduler, finish(0)) == [Assign(0, [2])]

    def test_unknown_tasks_are_ignored(self):
        scheduler = Scheduler(window=1)
        assert told(scheduler, cancel([5, 5], 0.0)) == []

    def test_a_backlog_full_of_cancelled_tasks_does_not_grow(self):
        scheduler = Scheduler(window=1)
        for first in range(0, 10_000, 100):
            scheduler.submit(range(first, first + 100), None, 0.0)
            scheduler.cancel(range(first, first + 100), 0.0)
        assert len(pickle.dumps(scheduler)) < 10_000  # of 10,000 tasks, each of several bytes
        assert told(scheduler, submit(-1), add_worker(0, 0.0)) == [Assign(0, [-1])]


class TestLoss:
    def test_a_worker_that_was_at_nothing_leaves_no_suspect(self):
        scheduler = Scheduler(window=3, poison_limit=1)
        assert told(scheduler, submit(1, 2, 3), add_worker(0, 0.0), lose(0, 0.0, ())) == []
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [1, 2, 3])]

    def test_what_it_is_known_to_have_been_at_is_blamed_and_not_what_it_was_believed_to_run(self):
        scheduler = Scheduler(window=3, poison_limit=1)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0))
        assert told(scheduler, lose(0, 0.0, (2,))) == [Poison(2, (0,))]
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [1, 3])]

    @pytest.mark.parametrize("task", [1, 99])
    def test_a_task_that_is_over_or_never_was_is_not_blamed(self, task):
        scheduler = Scheduler(window=3, poison_limit=1)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), finish(0, 1))
        assert told(scheduler, lose(0, 0.0, (task,))) == []
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [2])]

    def test_a_task_is_blamed_that_was_stolen_from_it_after_it_had_begun(self):
        scheduler = Scheduler(window=3, poison_limit=2)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), add_worker(1, 0.0), finish(1, 2), submit(3))
        told(scheduler, lose(0, 0.0, (3,)))
        assert told(scheduler, lose(1, 0.0, (3,))) == [Poison(3, (0, 1))]

    def test_the_window_goes_back_to_the_front_in_its_order(self):
        scheduler = Scheduler(window=3)
        told(scheduler, submit(1, 2, 3, 4, 5), add_worker(0, 0.0), lose(0, 0.0))
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [1])]  # the suspect, alone
        assert told(scheduler, finish(1, 1)) == [Deliver(1, 1), Assign(1, [2, 3, 4])]

    def test_two_lost_windows_are_merged_by_age(self):
        scheduler = Scheduler(window=2)
        told(scheduler, add_worker(0, 0.0), add_worker(1, 0.0), submit(1, 2, 3, 4))  # 0: 1 3, 1: 2 4
        told(scheduler, lose(1, 0.0), lose(0, 0.0))
        order = []
        instructions = told(scheduler, add_worker(2, 0.0))
        while len(order) < 4:
            order += [task for step in instructions if isinstance(step, Assign) for task in step.tasks]
            instructions = told(scheduler, finish(2, order[-1]))
        assert order == [1, 2, 3, 4]

    def test_waiting_workers_get_it_at_once(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, lose(0, 0.0)) == [Assign(1, [1])]

    def test_a_late_result_of_a_lost_worker_counts(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0), lose(0, 0.0))
        assert told(scheduler, finish(0, 1)) == [Deliver(1, 0), Revoke(1, [1])]
        assert told(scheduler, finish(1, 1)) == [Discard(1, 1), IdleWorkers([1])]

    def test_a_late_result_of_a_queued_task_counts(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), lose(0, 0.0))
        assert told(scheduler, finish(0, 1)) == [Deliver(1, 0)]
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [2])]

    def test_a_lost_worker_gets_nothing_until_it_joins(self):
        scheduler = Scheduler(window=2)
        told(scheduler, add_worker(0, 0.0), lose(0, 0.0), submit(1))
        assert told(scheduler, finish(0)) == []
        assert told(scheduler, add_worker(0, 0.0)) == [Assign(0, [1])]

    def test_losing_a_worker_twice_is_losing_it_once(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1), add_worker(0, 0.0), lose(0, 0.0))
        assert told(scheduler, lose(0, 0.0)) == []

    def test_joining_under_a_live_id_loses_the_forerunner(self):
        scheduler = Scheduler(window=2, poison_limit=2)
        told(scheduler, submit(1, 2), add_worker(0, 0.0))
        assert told(scheduler, add_worker(0, 0.0)) == [Assign(0, [1])]
        assert told(scheduler, add_worker(0, 0.0)) == [Poison(1, (0, 0)), Assign(0, [2])]


class TestPoison:
    def test_a_task_is_given_up_at_the_limit_and_its_neighbours_are_not(self):
        scheduler = Scheduler(window=2, poison_limit=3)
        told(
            scheduler,
            submit(1, 2),
            add_worker(0, 0.0),
            lose(0, 0.0),
            add_worker(1, 0.0),
            lose(1, 0.0),
            add_worker(2, 0.0),
        )
        assert told(scheduler, lose(2, 0.0)) == [Poison(1, (0, 1, 2))]
        assert told(scheduler, add_worker(3, 0.0)) == [Assign(3, [2])]
        assert told(scheduler, finish(3, 2)) == [Deliver(2, 3), IdleWorkers([3])]

    def test_the_task_that_the_worker_said_it_runs_is_blamed(self):
        scheduler = Scheduler(window=2, poison_limit=1)
        told(scheduler, submit(1, 2), add_worker(0, 0.0), finish(0, started=2))
        assert told(scheduler, lose(0, 0.0)) == [Poison(2, (0,))]

    def test_a_suspect_waits_for_an_empty_worker_and_nothing_joins_it(self):
        scheduler = Scheduler(window=2)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0), add_worker(1, 0.0))  # 0: 1 2, 1: 3
        assert told(scheduler, lose(0, 0.0)) == []
        assert told(scheduler, finish(1, 3)) == [Deliver(3, 1), Assign(1, [1])]
        assert told(scheduler, finish(1, 1)) == [Deliver(1, 1), Assign(1, [2])]

    def test_the_result_of_a_poisoned_task_is_discarded(self):
        scheduler = Scheduler(window=1, poison_limit=1)
        told(scheduler, submit(1), add_worker(0, 0.0), lose(0, 0.0))
        assert told(scheduler, finish(0, 1)) == [Discard(1, 0)]

    def test_an_idle_worker_that_is_lost_is_held_against_nothing(self):
        scheduler = Scheduler(window=1, poison_limit=1)
        assert told(scheduler, add_worker(0, 0.0), lose(0, 0.0), submit(1)) == []
        assert told(scheduler, add_worker(1, 0.0)) == [Assign(1, [1])]


class TestOvertaking:
    def test_others_take_over_what_a_worker_holds_that_has_stopped(self):
        scheduler = Scheduler(window=3, overtake_after_s=1.0)
        told(scheduler, submit(1, 2, 3), add_worker(0, 0.0), add_worker(1, 0.5))
        assert told(scheduler, tick(0.9)) == []
        assert told(scheduler, tick(1.0)) == [Revoke(0, [2]), Assign(1, [1, 2])]

    def test_a_busy_worker_takes_over_too(self):
        scheduler = Scheduler(window=2, overtake_after_s=1.0)
        told(scheduler, add_worker(0, 0.0), add_worker(1, 0.0), submit(1, 2, 3, 4), finish(1, 2, now=0.9))
        assert told(scheduler, tick(1.0)) == [Revoke(0, [3]), Assign(1, [1])]
        assert told(scheduler, finish(1, 4, now=1.1)) == [Deliver(4, 1), Assign(1, [3])]

    def test_one_that_was_overtaken_gets_nothing_until_it_is_heard_of(self):
        scheduler = Scheduler(window=2, overtake_after_s=1.0)
        told(scheduler, add_worker(0, 0.0), add_worker(1, 0.0), submit(1), tick(1.0))
        assert told(scheduler, submit(2, 3, 4, now=1.0)) == [Assign(1, [2])]
        assert told(scheduler, finish(1, 1, now=1.1))[:2] == [Deliver(1, 1), Revoke(0, [1])]
        assert told(scheduler, finish(0, 1, now=5.0)) == [Discard(1, 0), Assign(0, [4])]

    def test_what_usually_takes_long_is_not_held_up(self):
        scheduler = Scheduler(window=1, overtake_after_s=1.0)
        told(scheduler, add_worker(0, 0.0))
        now = 0.0
        for task in range(40):
            told(scheduler, submit(task, now=now))
            now += 0.9
            told(scheduler, finish(0, task, now=now))
        told(scheduler, submit(40, now=now), add_worker(1, now))
        assert told(scheduler, tick(now + 3.0)) == []
        assert told(scheduler, tick(now + 4.0)) == [Assign(1, [40])]

    def test_a_task_is_copied_once(self):
        scheduler = Scheduler(window=1, overtake_after_s=1.0)
        told(scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, tick(1.0)) == [Assign(1, [1])]
        assert scheduler.counters.copies == 1
        assert told(scheduler, add_worker(2, 9.0)) == [IdleWorkers([2])]
        assert told(scheduler, tick(9.0)) == []

    def test_the_copy_stays_when_the_first_holder_is_lost(self):
        scheduler = Scheduler(window=1, overtake_after_s=1.0)
        told(scheduler, submit(1), add_worker(0, 0.0), add_worker(1, 0.0), tick(1.0))
        assert told(scheduler, lose(0, 0.0)) == []
        assert told(scheduler, finish(1, 1)) == [Deliver(1, 1), IdleWorkers([1])]

    def test_a_pinned_task_is_not_copied(self):
        scheduler = Scheduler(window=1, overtake_after_s=1.0)
        told(scheduler, submit(1, to=0), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, tick(9.0)) == []

    def test_a_suspect_is_not_copied(self):
        scheduler = Scheduler(window=2, overtake_after_s=1.0)
        told(scheduler, submit(1), add_worker(0, 0.0), lose(0, 0.0), add_worker(0, 0.0), add_worker(1, 0.0))
        assert told(scheduler, tick(9.0)) == []

    def test_a_worker_that_hangs_alone_keeps_what_it_is_at(self):
        scheduler = Scheduler(window=2, overtake_after_s=1.0)
        told(scheduler, submit(1, 2), add_worker(0, 0.0))
        assert told(scheduler, tick(1.0)) == [Revoke(0, [2])]
        assert told(scheduler, tick(2.0)) == []
        assert told(scheduler, add_worker(1, 3.0)) == [Assign(1, [2])]
        assert told(scheduler, tick(3.1)) == [Assign(1, [1])]


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"window": 0}, OptionError),
            ({"window": 2.0}, OptionTypeError),
            ({"window": True}, OptionTypeError),
            ({"window": 1, "poison_limit": 0}, OptionError),
            ({"window": 1, "poison_limit": None}, OptionTypeError),
            ({"window": 1, "overtake_after_s": -1.0}, OptionError),
            ({"window": 1, "overtake_after_s": math.nan}, OptionError),
            ({"window": 1, "overtake_after_s": "1"}, OptionTypeError),
        ],
    )
    def test_options_out_of_range_are_refused_with_their_value(self, options, error):
        with pytest.raises(error, match="; give ") as caught:
            Scheduler(**options)
        assert repr(list(options.values())[-1]) in str(caught.value)

    def test_a_task_that_is_not_finished_cannot_be_submitted_again(self):
        scheduler = Scheduler(window=1)
        told(scheduler, submit(1))
        with pytest.raises(OptionError, match="task 1 is submitted"):
            scheduler.submit([2, 1], None, 0.0)
        with pytest.raises(OptionError, match="twice"):
            scheduler.submit([3, 3], None, 0.0)
        validate(scheduler)
        assert told(scheduler, add_worker(0, 0.0), finish(0, 1)) == [Deliver(1, 0), IdleWorkers([0])]

    def test_results_of_unknown_tasks_and_workers_are_discarded(self):
        scheduler = Scheduler(window=1)
        assert told(scheduler, finish(3, 9)) == [Discard(9, 3)]

    def test_a_result_named_twice_is_delivered_once(self):
        scheduler = Scheduler(window=1)
        assert told(scheduler, submit(1), add_worker(0, 0.0), finish(0, 1, 1)) == [
            Deliver(1, 0),
            Discard(1, 0),
            IdleWorkers([0]),
        ]

    def test_a_result_of_a_task_never_assigned_counts(self):
        scheduler = Scheduler(window=1)
        assert told(scheduler, submit(1, 2), add_worker(0, 0.0), finish(0, 2)) == [Deliver(2, 0)]
