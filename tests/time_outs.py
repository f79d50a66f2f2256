"""What happens to a test that takes too long: it fails, what it started is ended, and the run goes on.

pytest-timeout alone raises wherever the process is: in a report this ends the whole run, and in a `__del__` it is lost.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import pytest_timeout
from _pytest.outcomes import OutcomeException
from _pytest.runner import call_and_report

from tests.holdings import descendants
from tests.started_processes import MARK, end, end_after, end_marked

#: The time-out is repeated after so long, in the rest of the test and in its teardown; seconds.
REPEATED_S = 30.0


class TestTimedOut(OutcomeException):
    """A test took longer than it may. Not what hypothesis catches: it would look for a smaller example."""

    __test__ = False


class TimeOuts:
    """Plugin of a process that runs tests: time-outs that end one test and what it has started."""

    def __init__(self, config: pytest.Config) -> None:
        given = getattr(config, "workerinput", None)
        self._process = process_name(given) if given else str(os.getpid())
        self._above = os.environ.get(MARK, "")
        self._numbers = itertools.count()
        self._before: set[int] = set()
        self._fired = False
        self._mark("")
        end_after(os.getpid(), f"{self._process}.")

    def _mark(self, number: str) -> None:
        os.environ[MARK] = f"{self._above} {self._process}.{number}.".strip()

    def _end_new(self, before: set[int], number: str) -> None:
        end(set(descendants()) - before)
        end_marked(f"{self._process}.{number}.")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._before = set(descendants())
        self._fired = False
        number = str(next(self._numbers))
        self._mark(number)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            self._mark("")
            if self._fired:
                self._end_new(self._before, number)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        # Later tests use it too: it stays when this test is ended, unless it is what took too long.
        former, number = os.environ[MARK], str(next(self._numbers))
        before = set(descendants())
        self._mark(number)
        try:
            result = yield
        except OutcomeException:
            self._end_new(before, number)
            raise
        finally:
            os.environ[MARK] = former
        self._before |= set(descendants()) - before
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
        def fire(number: int, frame: FrameType | None) -> None:
            if pytest_timeout.is_debugging():
                return
            if not may_raise(frame):
                signal.setitimer(signal.ITIMER_REAL, 0.1, REPEATED_S)
                return
            if not self._fired:
                self._fired = True
                pytest_timeout.dump_stacks(item.config.get_terminal_writer())
            raise TestTimedOut(f"{item.nodeid} took longer than {settings.timeout:g} s")

        signal.signal(signal.SIGALRM, fire)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, REPEATED_S)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        # pytest-timeout would cancel it once a test has failed: its teardown could then take for ever.
        return True

    def pytest_unconfigure(self) -> None:
        end_marked(f"{self._process}.")


class EndsOfWorkers:
    """Plugin of the process that starts xdist's workers: what a worker has started ends with it."""

    def pytest_testnodedown(self, node: Any) -> None:
        end_marked(f"{process_name(node.workerinput)}.")


def process_name(given: dict[str, Any]) -> str:
    """Return the name of one of xdist's workers, unique over runs. `given` is what it receives at its start."""
    return f"{given['testrunuid']}-{given['workerid']}"


def may_raise(frame: FrameType | None) -> bool:
    """Return whether an exception that is raised here fails the test: its setup, call or teardown runs.

    Elsewhere pytest writes a report, where it would end the run; or an object is deleted, where it would be lost.
    """
    while frame is not None and frame.f_code.co_name != "__del__":
        if frame.f_code.co_name == "<lambda>" and frame.f_code in call_and_report.__code__.co_consts:
            return True
        frame = frame.f_back
    return False
