"""A clock that stands still while its process does."""

from __future__ import annotations

from torch_dpflow._core.threads import MAX_STEP_S, SuspendAwareClock


def test_time_goes_by_as_elsewhere_until_the_process_is_held_up() -> None:
    times = iter([100.0, 100.5, 101.25, 101.25, 131.25, 131.75])
    clock = SuspendAwareClock(lambda: next(times))
    assert [clock() - 100.0 for _ in range(3)] == [0.5, 1.25, 1.25]
    assert clock() - 100.0 == 1.25 + MAX_STEP_S
    assert clock() - 100.0 == 1.75 + MAX_STEP_S
