"""What becomes of a launcher's blocking calls: throttling, quotas, lost answers, hung calls, and the end."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from tests.remote.launchers.scripted_launcher import SOON_S, FaultyLauncher, ScriptedLauncher
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow.errors import (
    AnswerLostError,
    OptionError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.launchers import threaded_platform
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Fate, Outcome, Refused, Warned
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import End


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(stack: ExitStack) -> Callable[..., tuple[ThreadedPlatform, ScriptedLauncher]]:
    """Makes a platform over a scripted launcher, with some gates shut; they are opened before it is closed."""

    def new(
        *shut: str, deadline_s: float = 60.0, sweep_s: float = 60.0, **limits: Any
    ) -> tuple[ThreadedPlatform, ScriptedLauncher]:
        launcher = ScriptedLauncher(**limits)
        launcher.gates = {kind: threading.Event() for kind in shut}
        platform = ThreadedPlatform(launcher, deadline_s=deadline_s, sweep_s=sweep_s)
        stack.callback(platform.close)
        for gate in launcher.gates.values():
            stack.callback(gate.set)
        return platform, launcher

    return new


def take(platform: ThreadedPlatform, count: int) -> list[Outcome]:
    """Wait for so many outcomes; the descriptor says when there are some."""
    poller = select.poll()
    poller.register(platform.wakeup_fd, select.POLLIN)
    found: list[Outcome] = []
    while len(found) < count:
        assert poller.poll(PATIENCE_S * 1000), f"nothing follows {found}"
        fresh = platform.take()
        assert fresh, "readable only where there is something"
        found += fresh
    assert len(found) == count
    assert not poller.poll(0)
    return found


def test_a_start_waits_for_nothing_and_is_told_when_it_is_accepted(make: Any) -> None:
    platform, launcher = make("start")
    platform.start("a", b"{}")
    wait(lambda: launcher.made_of("start") == ["a"], what="the call")
    assert platform.take() == []
    launcher.gates["start"].set()
    assert take(platform, 1) == [Accepted("a", "ref of a")]


def test_no_more_calls_are_under_way_than_the_platform_bears(make: Any) -> None:
    platform, launcher = make("start", calls_at_once=3)
    for number in range(10):
        platform.start(str(number), b"{}")
    wait(lambda: len(launcher.made_of("start")) == 2, what="two starts: one call is kept for stops")
    platform.stop("stranger")
    wait(lambda: launcher.made_of("stop") == [("stranger", None)], what="the stop")
    launcher.gates["start"].set()
    told = take(platform, 10)
    assert {outcome.name for outcome in told if isinstance(outcome, Accepted)} == set("0123456789")
    assert launcher.most_at_once <= 3


def test_starts_are_spread_over_time_and_stops_are_not(make: Any) -> None:
    platform, launcher = make(starts_per_s=0.03)
    for name in "abcde":
        platform.start(name, b"{}")
    assert take(platform, 1) == [Accepted("a", "ref of a")]
    for name in "abcde":
        platform.stop(name, "enough")
    assert {outcome.name for outcome in take(platform, 5) if isinstance(outcome, Ended)} == set("abcde")
    assert launcher.made_of("start") == ["a"], "the others have never been asked for"


@pytest.mark.parametrize(
    "error",
    [
        ThrottledError("slow down", 3.0),
        QuotaError("full"),
        RejectedError("no image"),
        UnavailableError("503"),
    ],
)
def test_a_refusal_is_told_and_not_tried_again(make: Any, error: PlatformError) -> None:
    platform, launcher = make()
    launcher.raises["start"].append(error)
    platform.start("a", b"{}")
    assert take(platform, 1) == [Refused("a", error)]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
    platform.start("b", b"{}")
    take(platform, 1)
    assert launcher.made_of("start") == ["a", "b"]
    platform.suspect("a")  # which is not known any more
    assert platform.take() == []


@pytest.mark.parametrize("error", [AnswerLostError("timed out"), ValueError("a fault of the launcher")])
def test_a_worker_whose_answer_was_lost_is_stopped_by_its_name(make: Any, error: Exception) -> None:
    platform, launcher = make()
    launcher.raises["start"].append(error)
    platform.start("a", b"{}")
    (told,) = take(platform, 1)
    assert isinstance(told, Answerless)
    assert str(error) in told.text
    platform.stop("a", "it has not come")
    assert take(platform, 1) == [Ended("a", End(killed_for="it has not come"))]
    assert launcher.made_of("stop") == [("a", None)]
    assert launcher.there == {}


def test_a_start_that_hangs_holds_up_no_other_and_is_stopped_whenever_it_lands(make: Any) -> None:
    platform, launcher = make("start", deadline_s=SOON_S, calls_at_once=1)
    platform.start("a", b"{}")
    (told,) = take(platform, 1)
    assert isinstance(told, Answerless)
    platform.stop("a", "it has not come")
    assert take(platform, 1) == [Ended("a", End(killed_for="it has not come"))]
    platform.start("b", b"{}")
    wait(lambda: launcher.made_of("start") == ["a", "b"], what="the other's call")
    platform.stop("b")
    launcher.gates["start"].set()
    wait(lambda: ("a", "ref of a") in launcher.made_of("stop"), what="the stop of what was started so late")
    platform.close()
    assert launcher.there == {}
    ends = [outcome.name for outcome in platform._events if isinstance(outcome, Ended)]
    assert ends.count("b") == 1
    assert "a" not in ends, "it was told before"


def test_what_lands_during_a_look_that_misses_it_is_stopped_again(make: Any) -> None:
    platform, launcher = make("start", deadline_s=SOON_S)
    looked, answer = threading.Event(), threading.Event()

    def look(workers: Mapping[str, str | None]) -> dict[str, Fate]:
        looked.set()
        assert answer.wait(PATIENCE_S)
        return {}

    launcher.look = look
    platform.start("a", b"{}")
    take(platform, 1)
    platform.stop("a")
    assert looked.wait(PATIENCE_S)
    assert launcher.made_of("stop") == [("a", None)], "accepted, and there was nothing to stop yet"
    launcher.raises["stop"].append(UnavailableError("503"))
    launcher.gates["stop"] = threading.Event()
    launcher.gates["start"].set()
    wait(lambda: len(launcher.made_of("stop")) == 2, what="another stop")
    answer.set()
    wait(lambda: not platform._looking, what="the end of the look")
    launcher.gates["stop"].set()
    assert take(platform, 1) == [Ended("a", End())]
    assert launcher.there == {}


def test_a_stop_waits_for_the_answer_of_a_start_that_is_under_way(make: Any) -> None:
    platform, launcher = make("start")
    platform.start("a", b"{}")
    wait(lambda: launcher.made_of("start") == ["a"], what="the call")
    platform.stop("a", "changed my mind")
    platform.stop("other")
    wait(lambda: launcher.made_of("stop") == [("other", None)], what="the other's stop")
    launcher.gates["start"].set()
    assert take(platform, 1) == [Ended("a", End(killed_for="changed my mind"))]
    assert launcher.made_of("stop")[1:] == [("a", "ref of a")]


def test_what_is_stopped_while_its_start_is_refused_was_refused(make: Any) -> None:
    platform, launcher = make("start")
    launcher.raises["start"].append(QuotaError("full"))
    platform.start("a", b"{}")
    wait(lambda: launcher.made_of("start") == ["a"], what="the call")
    platform.stop("a")
    launcher.gates["start"].set()
    (told,) = take(platform, 1)
    assert isinstance(told, Refused)
    assert launcher.made_of("stop") == []


def test_names_that_nobody_knows_can_be_stopped(make: Any) -> None:
    platform, launcher = make()
    launcher.there["left"] = "by another"
    platform.stop("left", "swept")
    wait(lambda: launcher.there == {}, what="its end")
    platform.close()
    assert platform.take() == [], "it was not started here"


def test_a_stop_is_repeated_until_it_is_accepted(make: Any) -> None:
    platform, launcher = make()
    platform.start("a", b"{}")
    take(platform, 1)
    launcher.raises["stop"] += [ThrottledError("slow down"), ValueError("a fault of the launcher")]
    platform.stop("a")
    assert take(platform, 1) == [Ended("a", End())]
    assert len(launcher.made_of("stop")) == 3


def test_suspects_are_looked_at_and_nobody_else(make: Any) -> None:
    platform, launcher = make()
    for name in "abc":
        platform.start(name, b"{}")
    take(platform, 3)
    launcher.fates["b"] = Fate(end=End(code=3, report="alas"))
    platform.suspect("b")
    assert take(platform, 1) == [Ended("b", End(code=3, report="alas"))]
    assert launcher.made_of("look") == [{"b": "ref of b"}]


def test_all_are_looked_at_now_and_then(make: Any) -> None:
    platform, launcher = make(sweep_s=0.05)
    for name in "ab":
        platform.start(name, b"{}")
    take(platform, 2)
    wait(lambda: {"a": "ref of a", "b": "ref of b"} in launcher.made_of("look"), what="a sweep")
    launcher.fates["a"] = Fate(end=End(code=1))
    assert take(platform, 1) == [Ended("a", End(code=1))]


def test_a_warning_is_told_once(make: Any) -> None:
    platform, launcher = make(sweep_s=0.02)
    platform.start("a", b"{}")
    take(platform, 1)
    launcher.fates["a"] = Fate(until_s=30.0)
    assert take(platform, 1) == [Warned("a", 30.0)]
    seen = len(launcher.made_of("look"))
    wait(lambda: len(launcher.made_of("look")) > seen + 1, what="two more looks")
    assert platform.take() == []


def test_a_look_that_fails_is_repeated(make: Any) -> None:
    platform, launcher = make()
    platform.start("a", b"{}")
    take(platform, 1)
    launcher.raises["look"].append(UnavailableError("503"))
    launcher.fates["a"] = Fate(end=End(code=1))
    platform.suspect("a")
    assert take(platform, 1) == [Ended("a", End(code=1))]


def test_a_stop_that_nobody_can_confirm_counts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_platform, "CONFIRM_S", 0.05)
    platform, launcher = make()
    platform.start("a", b"{}")
    take(platform, 1)
    launcher.stop = lambda name, ref: None  # accepted, and it stays
    platform.stop("a")
    assert take(platform, 1) == [Ended("a", End())]
    launcher.there.clear()


def test_closing_stops_starts_that_are_under_way_and_drops_those_that_wait(make: Any) -> None:
    platform, launcher = make("start", calls_at_once=4)
    for number in range(8):
        platform.start(str(number), b"{}")
    wait(lambda: len(launcher.made_of("start")) == 3, what="the first starts")
    closer = threading.Thread(target=platform.close)
    closer.start()
    wait(lambda: platform._closed, what="closing")
    with pytest.raises(OptionError, match="closed"):
        platform.start("late", b"{}")
    launcher.gates["start"].set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert len(launcher.made_of("start")) == 3
    assert len(launcher.made_of("stop")) == 3
    assert launcher.there == {}
    assert launcher.closed == 1


def test_closing_gives_workers_time_to_leave_and_ends_the_others(make: Any) -> None:
    platform, launcher = make()
    for name in "ab":
        platform.start(name, b"{}")
    take(platform, 2)
    launcher.fates["a"] = Fate(end=End(code=0))  # told by the first look
    platform.close(grace_s=2.0)
    assert launcher.made_of("stop") == [("b", "ref of b")]
    platform.close()
    assert launcher.closed == 1


def test_closing_does_not_wait_for_ever(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded_platform, "CLOSE_S", 2 * SOON_S)
    platform, launcher = make("start", "stop", deadline_s=SOON_S)
    platform.start("a", b"{}")
    wait(lambda: launcher.made_of("start") == ["a"], what="the call")
    platform.close()
    assert "not known to be stopped: a" in caplog.text
    launcher.gates["stop"].set()
    launcher.gates["start"].set()
    wait(lambda: ("a", "ref of a") in launcher.made_of("stop"), what="the stop of what was started too late")
    wait(lambda: "started after its platform was closed: stopped" in caplog.text, what="the line that says so")


def test_a_fork_ends_no_worker_of_its_parent(make: Any) -> None:
    platform, launcher = make()
    platform.start("a", b"{}")
    take(platform, 1)
    child = multiprocessing.get_context("fork").Process(target=platform.close)
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    assert [*launcher.there] == ["a"]
    assert launcher.closed == 0


def test_what_cannot_be_started_is_refused_at_once(make: Any) -> None:
    platform, launcher = make("start")
    platform.start("a", b"1234")
    with pytest.raises(OptionError, match="a cannot be started again"):
        platform.start("a", b"{}")
    with pytest.raises(OptionError, match="8193 bytes; at most 8192 are allowed"):
        platform.start("b", bytes(8193))
    launcher.gates["start"].set()
    assert take(platform, 1) == [Accepted("a", "ref of a")]


def test_a_launch_spec_is_not_shown_and_forgotten_once_it_is_sent(make: Any) -> None:
    platform, _ = make(starts_per_s=0.1)
    for name in "ab":
        platform.start(name, b"a secret")
    take(platform, 1)
    assert platform._workers["a"].launch_spec == b""
    assert platform._workers["b"].launch_spec == b"a secret", "it waits"
    assert "secret" not in repr(platform._workers)


def test_where_no_thread_can_be_had_workers_are_stopped_still(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, launcher = make()
    platform.start("a", b"{}")
    take(platform, 1)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dpflow-call":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    platform.close()
    assert launcher.there == {}
    assert platform.take() == [Ended("a", End(killed_for="its platform is closed"))]


def test_the_thread_idles_while_nothing_is_due(make: Any) -> None:
    platform, _ = make()
    platform.start("a", b"{}")
    take(platform, 1)
    with platform._changed:
        idle_s = platform._idle_s(time.monotonic())
    assert idle_s is not None
    assert idle_s > 1.0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_each_end_is_told_once_and_nothing_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded_platform, "MAX_PAUSE_S", 0.05)  # most stops are repeated
    launcher, chance = FaultyLauncher(seed), random.Random(seed)
    platform = ThreadedPlatform(launcher, deadline_s=SOON_S, sweep_s=0.05)
    names = [str(number) for number in range(40)]
    told: list[Outcome] = []
    for name in names:
        platform.start(name, b"{}")
        for act in chance.sample([platform.stop, platform.suspect], chance.randrange(3)):
            act(chance.choice(names[: int(name) + 1]))
        told += platform.take()
    platform.close(grace_s=chance.choice([0.0, 0.1]))
    told += platform.take()
    lasts = Counter(outcome.name for outcome in told if isinstance(outcome, Ended | Refused))
    assert lasts == Counter(names)
    for name in names:
        (last,) = [outcome for outcome in told if isinstance(outcome, Ended | Refused) and outcome.name == name]
        assert [outcome for outcome in told if outcome.name == name][-1] is last
    wait(lambda: not launcher.there and not launcher.at_once.total(), what="the stops of what was started late")
