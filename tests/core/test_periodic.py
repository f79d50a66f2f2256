"""A call that a thread repeats: when it is due, requests, failures, the end."""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import CallTiming, PeriodicCall

PATIENCE_S = 60.0


@given(
    interval_s=st.sampled_from([0.0, 0.25, 2.0, math.inf]),
    steps=st.lists(st.tuples(st.sampled_from(["succeed", "fail", "request"]), st.integers(0, 64)), max_size=50),
)
def test_a_call_is_due_by_interval_or_request_and_never_within_a_back_off(
    interval_s: float, steps: list[tuple[str, int]]
) -> None:
    now, not_before, failures = 0.0, 0.0, 0
    timing = CallTiming(interval_s, now, Backoff(0.5, 4.0, draw=lambda: 0.5))
    expected = interval_s
    for what, ticks in steps:
        now += ticks / 8  # exact in binary, as all times here
        if what == "succeed":
            timing.on_success(now)
            not_before, expected, failures = now, now + interval_s, 0
        elif what == "fail":
            timing.on_failure(now)
            not_before = expected = now + min(4.0, 0.5 * 2**failures) / 2
            failures += 1
        else:
            timing.on_request()
            expected = not_before
        assert timing.due == expected


def started(
    call: Callable[[], None],
    interval_s: float = math.inf,
    *,
    on_error: Callable[[Exception], None] = lambda _: None,
    finish: Callable[[], None] = lambda: None,
) -> PeriodicCall:
    thread = PeriodicCall(call, interval_s, "dpflow-test", on_error=on_error, finish=finish)
    thread.start()
    return thread


def test_a_request_is_followed_by_a_call_and_the_end_by_none() -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    thread = started(lambda: calls.put("call"), finish=lambda: calls.put("finish"))
    for _ in range(2):
        thread.wake()
        assert calls.get(timeout=PATIENCE_S) == "call"
    thread.stop()
    assert calls.get(timeout=PATIENCE_S) == "finish"
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert calls.empty()


def test_a_request_during_a_call_is_followed_by_another_call() -> None:
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()
    may_return = threading.Semaphore(0)

    def call() -> None:
        begun.put(None)
        may_return.acquire()

    thread = started(call)
    thread.wake()
    begun.get(timeout=PATIENCE_S)
    thread.wake()
    may_return.release()
    begun.get(timeout=PATIENCE_S)
    thread.stop()
    may_return.release()
    thread.join(PATIENCE_S)
    assert begun.empty()


def test_a_call_is_repeated_at_its_interval_and_after_failures() -> None:
    outcomes: list[Exception | None] = [None, ValueError("one"), RuntimeError("two"), None]
    errors: list[Exception] = []
    done = threading.Event()

    def call() -> None:
        if not outcomes:
            done.set()
        elif (error := outcomes.pop(0)) is not None:
            raise error

    thread = started(call, 0.0, on_error=errors.append)
    assert done.wait(PATIENCE_S)
    thread.stop()
    thread.join(PATIENCE_S)
    assert [str(error) for error in errors] == ["one", "two"]


def test_one_that_is_stopped_before_it_starts_calls_nothing() -> None:
    calls: list[None] = []
    thread = PeriodicCall(lambda: calls.append(None), 0.0, "dpflow-test", on_error=lambda _: None)
    thread.stop()
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not calls


def test_an_ended_thread_leaves_no_reference_cycle() -> None:
    class Owner:
        def __init__(self) -> None:
            self.thread = started(self.call, on_error=self.on_error, finish=self.call)

        def call(self) -> None: ...

        def on_error(self, error: Exception) -> None: ...

    owner = Owner()
    owner.thread.stop()
    owner.thread.join(PATIENCE_S)
    freed = weakref.ref(owner)
    del owner
    assert freed() is None
