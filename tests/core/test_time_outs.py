"""A test that takes too long fails alone: what it started is ended, and the run goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.new_process import ROOT, Interpreter
from tests.started_processes import MARK, end_after, started_by

#: Each hangs somewhere else; every second test passes.
TESTS = """
import os, signal, subprocess, threading, time
from contextlib import suppress
from pathlib import Path
import pytest

#: What a test starts that takes too long: a length of time that no other process sleeps.
LONG = f"1000.{os.getpid()}"

def left():
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [each] if LONG.encode() in each.read_bytes() else []
    return found

def time_out():
    "Let this test's time end soon: how long a machine takes for what comes before does not matter."
    signal.setitimer(signal.ITIMER_REAL, 0.2, 30.0)

def hang():
    time_out()
    while True:
        threading.Event().wait(1)

class Hanging:
    "Where an exception cannot be raised: past the time at which one would be."
    ended = 0

    def __repr__(self):
        time_out()
        begun = time.monotonic()
        while time.monotonic() < begun + 0.3:
            threading.Event().wait(0.01)
        Hanging.ended += 1
        return "<Hanging>"

    def __del__(self):
        repr(self)

    def tries(self):
        self.tried = getattr(self, "tried", 0) + 1
        return self.tried > 30

@pytest.fixture(scope="module")
def kept():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()

@pytest.fixture
def hangs_at_its_start():
    subprocess.Popen(["sleep", LONG])
    hang()

@pytest.fixture
def hangs_at_its_end():
    yield
    hang()

def test_in_the_call(kept):
    subprocess.Popen(["sh", "-c", f"sleep {LONG} & setsid sleep {LONG} & trap '' TERM; wait"])
    subprocess.run(["setsid", "-f", "sleep", LONG])
    hang()

def test_1(kept):
    assert kept.poll() is None and not left()

def test_in_setup(hangs_at_its_start): pass

def test_2(kept):
    assert kept.poll() is None and not left()

def test_in_teardown(hangs_at_its_end): pass

def test_after_an_error(hangs_at_its_end):
    raise ValueError("an error of the test")

@pytest.mark.parametrize("argument", [Hanging()], ids=["object"])
def test_in_the_report(argument):
    raise ValueError("an error of the test")

def test_3():
    assert Hanging.ended, "an exception was raised in the report"

def test_in_a_finalizer():
    Hanging.ended = 0
    Hanging()
    assert Hanging.ended, "an exception was raised where it is lost"
    hang()

def test_4(kept):
    assert kept.poll() is None
"""


#: What the summary says of each test.
OUTCOMES = {
    "in_the_call": "FAILED: TestTimedOut",
    "in_setup": "ERROR: TestTimedOut",
    "in_teardown": "ERROR: TestTimedOut",
    "after_an_error": "FAILED: ValueError, ERROR: TestTimedOut",
    "in_the_report[object]": "FAILED: ValueError",
    "in_a_finalizer": "FAILED: TestTimedOut",
}


def test_a_time_out_fails_one_test(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "setup.cfg"), "-n", "0"]
    options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnraisableExceptionWarning", "--tb", "long"]
    env = {**os.environ, "COLUMNS": "300"}
    with Interpreter([*command, *options, str(tmp_path)], cwd=ROOT, env=env) as process:
        out, errors = process.communicate()
    assert "skipped here:\n" in out
    assert "INTERNALERROR" not in out + errors
    said = re.findall(r"^(FAILED|ERROR) \S+::test_(\S+) - (?:tests.time_outs.)?(\w+)", out, re.MULTILINE)
    outcomes: dict[str, str] = {}
    for outcome, test, error in sorted(said, reverse=True):
        outcomes[test] = ", ".join(filter(None, [outcomes.get(test), f"{outcome}: {error}"]))
    assert outcomes == OUTCOMES, out
    assert re.search(r"\b4 failed, 5 passed, 3 errors\b", out), out
    assert not started_by(os.environ[MARK].split()[-1]), "processes of the tests still run"


def test_what_a_killed_test_process_has_started_is_ended(eventually: Callable[..., None]) -> None:
    name = f"{os.urandom(8).hex()}."
    with subprocess.Popen(["sleep", "1000"]) as tests, subprocess.Popen(["sleep", "1000"]) as other:
        started = {**os.environ, MARK: f"{os.environ[MARK]} {name}7."}
        subprocess.run(["setsid", "--fork", "sleep", "1000"], env=started, check=True)
        end_after(tests.pid, name)
        assert len(started_by(name)) == 1, "it waits for the end of the process"
        tests.kill()
        eventually(lambda: not started_by(name), what="the end of what it started")
        assert other.poll() is None
        other.kill()
