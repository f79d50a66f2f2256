"""The contract suite of launchers: subclass `LauncherContract`, make one, and let pytest collect it.

::

    class TestMyLauncher(LauncherContract):
        def new_launcher(self, module):
            return MyLauncher(entry=module)
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from tests.contracts.platforms import wakes
from tests.contracts.processes import CODE, LAST_WORDS, TIMEOUT_S
from torch_dpflow.errors import OptionError, PlatformError
from torch_dpflow.ipc.messages.remote_worker import MAX_LAUNCH_SPEC_BYTES
from torch_dpflow.remote.launchers.contract import (
    Accepted,
    Ended,
    Launcher,
    Outcome,
    RemotePlatform,
    prefix_of,
)
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform

CLUSTER, GROUP = "0c0ffee0", "0123456789"
PREFIX = prefix_of(CLUSTER)
#: In all launch specs, as a worker's secret key is.
SECRET = "m3mb3r-s3cr3t"
PROGRAM = "tests.contracts.processes"


#: Part of the next names, new for every platform and run, because some platforms refuse names used before.
_incarnation = time.time_ns() // 1000


def name_of(number: int) -> str:
    return f"{prefix_of(CLUSTER, GROUP)}{number}-{_incarnation}"


class LauncherContract:
    """The contract of `torch_dpflow.remote.launchers.contract`, as tests, of a launcher by itself and under `Calls`."""

    #: How a process is started that starts workers and is killed.
    starter: Any = multiprocessing.get_context("fork")
    #: The address of this host at which workers can call.
    near = "127.0.0.1"

    def new_launcher(self, module: str) -> Launcher:
        """A launcher whose workers run `module`, as `python -m module` or by its `run(launch_spec)`."""
        raise NotImplementedError(f"{type(self).__name__} must say what to test")

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        """For errors that can be brought about, a launcher whose `start` raises them.

        A command that itself starts the worker, such as a shell, hides a missing interpreter: its end is a fate.
        """
        return {}

    @pytest.fixture(autouse=True)
    def new_names(self) -> None:
        global _incarnation
        _incarnation += 1

    @pytest.fixture
    def launcher(self) -> Iterator[Launcher]:
        with closing(self.new_launcher(PROGRAM)) as launcher:
            yield launcher
            remove_all(launcher)

    @pytest.fixture
    def platform(self, launcher: Launcher) -> Iterator[RemotePlatform]:
        with closing(ThreadedPlatform(launcher)) as platform:
            yield platform

    @pytest.fixture
    def listener(self) -> Iterator[socket.socket]:
        """A listening socket, to which workers connect."""
        with socket.create_server((self.near, 0)) as server:
            server.settimeout(TIMEOUT_S)
            yield server

    def test_a_start_is_reported_and_the_worker_calls(self, platform: RemotePlatform, listener: socket.socket) -> None:
        launch_spec = launch_spec_to(listener)
        platform.start(name_of(0), launch_spec)
        (outcome,) = outcomes(platform)
        assert isinstance(outcome, Accepted)
        assert outcome.name == name_of(0)
        with caller(listener) as (_, received):
            assert received == launch_spec

    def test_the_longest_launch_spec_arrives_whole(self, platform: RemotePlatform, listener: socket.socket) -> None:
        launch_spec = launch_spec_to(listener)
        launch_spec = launch_spec_to(listener, padding="x" * (MAX_LAUNCH_SPEC_BYTES - len(launch_spec)))
        assert len(launch_spec) == MAX_LAUNCH_SPEC_BYTES
        platform.start(name_of(0), launch_spec)
        with caller(listener) as (_, received):
            assert received == launch_spec
        with pytest.raises(OptionError, match="bytes"):
            platform.start(name_of(1), launch_spec + b" ")

    def test_a_start_may_be_repeated_under_its_name(self, launcher: Launcher, listener: socket.socket) -> None:
        if not launcher.limits.can_list:
            pytest.skip("the platform cannot tell")
        for _ in range(2):
            with suppress(PlatformError):
                launcher.start(name_of(0), launch_spec_to(listener), deadline_s=TIMEOUT_S)
        with caller(listener):
            assert [*launcher.list(PREFIX)] == [name_of(0)]

    def test_a_refusal_says_why_and_starts_nothing(self, listener: socket.socket) -> None:
        for kind, new in self.refusing().items():
            with closing(new()) as launcher:
                with pytest.raises(kind, match=name_of(0)):
                    launcher.start(name_of(0), launch_spec_to(listener), deadline_s=TIMEOUT_S)
                assert name_of(0) not in launcher.look({name_of(0): None})

    def test_a_check_has_no_effect(self, launcher: Launcher) -> None:
        assert all(finding.good and finding.text for finding in launcher.check())
        assert launcher.limits.can_list is False or not launcher.list(PREFIX)

    @pytest.mark.parametrize("by_name", [False, True])
    def test_a_stop_ends_a_worker_and_may_be_repeated(
        self, launcher: Launcher, listener: socket.socket, by_name: bool
    ) -> None:
        ref = launcher.start(name_of(0), launch_spec_to(listener), deadline_s=TIMEOUT_S)
        with caller(listener) as (connection, _):
            for _ in range(2):
                launcher.stop(name_of(0), None if by_name else ref)
            assert not launcher.limits.can_stop or connection.recv(1) == b"", "it has ended"
        launcher.stop(name_of(0), ref)

    def test_what_is_not_there_can_be_stopped_and_is_not_known(self, launcher: Launcher) -> None:
        launcher.stop(name_of(9), None)
        assert launcher.look({name_of(9): None}) == {}

    def test_an_end_is_reported_once_with_the_last_words(
        self, platform: RemotePlatform, listener: socket.socket
    ) -> None:
        platform.start(name_of(0), launch_spec_to(listener, leave=True))
        (outcome,) = outcomes(platform)
        assert isinstance(outcome, Accepted)
        end = ended(platform, name_of(0)).end
        assert end.code == CODE
        assert LAST_WORDS in str(end)
        platform.suspect(name_of(0))
        assert not wakes(platform, 0.0)

    def test_the_end_of_a_stopped_worker_is_reported(self, platform: RemotePlatform, listener: socket.socket) -> None:
        platform.start(name_of(0), launch_spec_to(listener))
        with caller(listener) as (connection, _):
            platform.stop(name_of(0), "it was in the way")
            assert ended(platform, name_of(0)).end.killed_for == "it was in the way"
            assert not platform.limits.can_stop or connection.recv(1) == b""

    def test_others_find_and_end_what_a_killed_starter_has_left(
        self, launcher: Launcher, listener: socket.socket
    ) -> None:
        if not launcher.limits.can_list:
            pytest.skip("the platform cannot list")
        starter = self.starter.Process(
            target=start_and_stay, args=(self.new_launcher, name_of(0), launch_spec_to(listener))
        )
        starter.start()
        with caller(listener) as (connection, _):
            starter.kill()
            starter.join()
            assert [*launcher.list(PREFIX)] == [name_of(0)]
            launcher.stop(name_of(0), None)
            assert connection.recv(1) == b""

    def test_closing_a_launcher_ends_no_worker(self, launcher: Launcher, listener: socket.socket) -> None:
        with closing(self.new_launcher(PROGRAM)) as first:
            first.start(name_of(0), launch_spec_to(listener), deadline_s=TIMEOUT_S)
            with caller(listener) as (connection, _):
                first.close()
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
                if not launcher.limits.can_list:
                    return  # only this process has a record of it
                assert launcher.look({name_of(0): None})[name_of(0)].end is None
                launcher.stop(name_of(0), None)
                connection.settimeout(TIMEOUT_S)
                assert connection.recv(1) == b""

    def test_closing_a_platform_leaves_nothing(self, launcher: Launcher, listener: socket.socket) -> None:
        platform = ThreadedPlatform(launcher)
        for number in range(3):
            platform.start(name_of(number), launch_spec_to(listener))
        with caller(listener) as (connection, _):
            platform.close()  # the others may be on their way
            assert not launcher.limits.can_stop or connection.recv(1) == b""
        assert not launcher.limits.can_list or not launcher.list(PREFIX)
        platform.close()

    def test_no_text_quotes_a_launch_spec(
        self, launcher: Launcher, listener: socket.socket, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        with closing(ThreadedPlatform(launcher)) as platform:
            platform.start(name_of(0), launch_spec_to(listener, leave=True))
            texts = [repr(platform.take()), repr(ended(platform, name_of(0))), repr(launcher), repr(platform)]
        for new in self.refusing().values():
            with closing(new()) as refusing, pytest.raises(PlatformError) as raised:
                refusing.start(name_of(1), launch_spec_to(listener), deadline_s=TIMEOUT_S)
            texts.append(repr(raised.value))
        texts.append(caplog.text)
        caplog.clear()  # an SDK's records keep its answers, and those its connections
        assert not [text for text in texts if SECRET in text]


def launch_spec_to(listener: socket.socket, **fields: Any) -> bytes:
    """Return a launch spec with the address of `listener`."""
    return json.dumps({"address": listener.getsockname(), "secret": SECRET, "padding": "", **fields}).encode()


@contextmanager
def caller(listener: socket.socket) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield the next worker that connects, and the launch spec that it received. The worker ends after the block."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        yield connection, connection.recv(size, socket.MSG_WAITALL)


def outcomes(platform: RemotePlatform) -> list[Outcome]:
    """Wait for outcomes of starts and ends."""
    assert wakes(platform, TIMEOUT_S), "nothing has happened"
    return list(platform.take())


def ended(platform: RemotePlatform, name: str) -> Ended:
    """Report a worker as suspect, and wait for its end."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        platform.suspect(name)
        if wakes(platform, 1.0):
            for outcome in platform.take():
                if isinstance(outcome, Ended):
                    assert outcome.name == name
                    return outcome
    raise AssertionError(f"{name} has not ended")


def remove_all(launcher: Launcher) -> None:
    """End the workers that a test has left."""
    deadline = time.monotonic() + TIMEOUT_S
    while launcher.limits.can_list and (left := launcher.list(PREFIX)):
        for name, ref in left.items():
            launcher.stop(name, ref)
        assert time.monotonic() < deadline, f"cannot be ended: {sorted(left)}"


def start_and_stay(new_launcher: Callable[[str], Launcher], name: str, launch_spec: bytes) -> None:
    """Start a worker, and keep running."""
    launcher = new_launcher(PROGRAM)
    launcher.start(name, launch_spec, deadline_s=TIMEOUT_S)
    time.sleep(TIMEOUT_S)
