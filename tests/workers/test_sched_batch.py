"""Workers run in long turns, and the threads that were there before do not."""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import suppress

import pytest

from torch_dpflow import DPFlowDataLoader
from torch_dpflow.workers.process_control import use_sched_batch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="time slices are Linux's")


class Scheduling(list[int]):
    """What the scheduler knows of whoever loads a sample."""

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        return os.sched_getscheduler(0)


def in_a_thread(act: object) -> object:
    told: list[object] = []
    thread = threading.Thread(target=lambda: told.append(act()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return told[0]


def policy_of_batch_work() -> int:
    """What the system gives to whoever asks for it in Python's own way; the policy that was there where it refuses."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return os.sched_getscheduler(0)


def test_a_thread_keeps_its_share_and_others_stay_as_they_are() -> None:
    def act() -> tuple[bool, int, int]:
        agreed = use_sched_batch()
        return agreed, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    agreed, policy, nice = in_a_thread(act)  # type: ignore[misc]
    assert policy == in_a_thread(policy_of_batch_work)
    assert agreed == (policy == os.SCHED_BATCH)
    assert nice == before[1]
    assert os.sched_getscheduler(0) == before[0]


def test_a_policy_that_somebody_has_chosen_stays() -> None:
    def act() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return use_sched_batch(), os.sched_getscheduler(0)

    assert in_a_thread(act) == (False, os.SCHED_IDLE)


def test_a_system_that_does_not_tell_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "sched_getscheduler", unknown)
    assert use_sched_batch() is False


def test_a_loaders_workers_take_them_after_their_first_batch() -> None:
    before = os.sched_getscheduler(0)
    expected = in_a_thread(policy_of_batch_work)
    first, second = DPFlowDataLoader(Scheduling([0] * 8), batch_size=4, num_workers=1)
    assert set(first.tolist()) == {before}
    assert set(second.tolist()) == {expected}
    assert os.sched_getscheduler(0) == before
