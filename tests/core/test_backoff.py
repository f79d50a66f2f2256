"""The pauses between attempts: they grow up to a limit, and are drawn anew for each caller."""

from __future__ import annotations

import random

from torch_dpflow._core.backoff import Backoff


def test_the_longest_pause_doubles_up_to_a_limit() -> None:
    backoff = Backoff(0.5, 3.0, draw=lambda: 1.0)
    assert [backoff.pause_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.pause_s() == 0.5


def test_a_part_of_it_is_waited() -> None:
    backoff = Backoff(2.0, 9.0, draw=lambda: 0.25)
    assert [backoff.pause_s(), backoff.pause_s()] == [0.5, 1.0]


def test_failures_without_end_have_a_longest_pause() -> None:
    backoff = Backoff(0.1, 0.5)
    assert all(0 <= backoff.pause_s() <= 0.5 for _ in range(3000))


def test_callers_with_one_seed_do_not_come_back_together() -> None:
    random.seed(0)
    one = Backoff(1.0, 1.0).pause_s()
    random.seed(0)
    assert Backoff(1.0, 1.0).pause_s() != one
