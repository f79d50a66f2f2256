"""The contract suite of platforms: subclass `PlatformContract`, make one, and let pytest collect it.

::

    class TestMyPlatform(PlatformContract):
        def new_platform(self):
            return MyPlatform()
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.processes import (
    TIMEOUT_S,
    answer,
    call_at,
    end_main_thread,
    ignore,
    leave,
    lend,
    raise_signals,
    sleep,
    start_and_stay,
    write_and_die,
)
from torch_dpflow._core.processes import is_exiting
from torch_dpflow.errors import NotPicklableError
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import WorkerHandshake, decode
from torch_dpflow.remote.launchers.contract import RemotePlatform
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Handle, Platform, ProcessSpec


class PlatformContract:
    """The contract of `torch_dpflow.workers.platform`, as tests.

    Where processes do not share this host's network and files a subclass leaves out the tests that need them.
    """

    #: How a process is started that uses the platform.
    starter: Any = multiprocessing.get_context("fork")

    def new_platform(self) -> Platform:
        """A platform that has started nothing."""
        raise NotImplementedError(f"{type(self).__name__} must say what to test")

    @pytest.fixture
    def platform(self) -> Iterator[Platform]:
        platform = self.new_platform()
        yield platform
        platform.close()

    @pytest.fixture
    def listener(self) -> Iterator[socket.socket]:
        """A listening socket to which the test's processes connect."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT_S)
            yield server

    def launch(
        self, platform: Platform, target: Any, *arguments: Any, name: str = "one", report_file: str = ""
    ) -> Handle:
        spec = ProcessSpec(name=name, incarnation=3, target=target, arguments=arguments, report_file=report_file)
        return platform.launch(spec)

    def ended(self, platform: Platform) -> list[Handle]:
        """Wait for an end; the handles of the ended processes."""
        assert wakes(platform, TIMEOUT_S), "no process has ended"
        return list(platform.take_ended())

    def end_of(self, platform: Platform, handle: Handle) -> End:
        """Wait for the end of `handle`, the only process that runs."""
        assert self.ended(platform) == [handle]
        end = handle.describe()
        assert end is not None
        return end

    def test_arguments_arrive_whole(self, platform: Platform, listener: socket.socket) -> None:
        data = os.urandom(1 << 16)
        handle = self.launch(platform, call_at, listener.getsockname(), data)
        assert (handle.name, handle.incarnation) == ("one", 3)
        assert received(listener) == data
        assert self.end_of(platform, handle).code == 0

    def test_what_cannot_travel_is_refused_and_others_go_on(self, platform: Platform) -> None:
        refused = None
        try:
            handle = self.launch(platform, sleep, threading.Lock())
        except NotPicklableError as error:
            refused = str(error)
        else:  # it was inherited, and cannot be slept for
            assert self.end_of(platform, handle).code == 1
        assert refused is None or ("one" in refused and "lock" in refused)
        again = self.launch(platform, leave, 0)
        assert self.end_of(platform, again).code == 0

    def test_an_end_is_reported_once_with_its_code(self, platform: Platform) -> None:
        handle = self.launch(platform, leave, 7)
        end = self.end_of(platform, handle)
        assert (end.code, end.signal) == (7, None)
        assert "exited with code 7" in str(end)
        assert not wakes(platform, 0.0)
        assert list(platform.take_ended()) == []
        assert handle.describe() == end, "repeatable"

    def test_nothing_is_reported_of_a_running_process(self, platform: Platform) -> None:
        handle = self.launch(platform, sleep, TIMEOUT_S)
        assert not wakes(platform, 0.0)
        assert list(platform.take_ended()) == []
        assert handle.describe() is None

    def test_a_kill_is_reported_with_its_reason(self, platform: Platform) -> None:
        handle = self.launch(platform, sleep, TIMEOUT_S)
        handle.kill("it was in the way")
        handle.kill()
        end = self.end_of(platform, handle)
        assert end.killed_for == "it was in the way"
        assert "was killed: it was in the way" in str(end)
        handle.kill("again")  # without effect: it has ended
        assert handle.describe() == end

    def test_a_kill_of_an_exiting_process_is_not_its_reason(
        self, platform: Platform, eventually: Callable[..., None]
    ) -> None:
        """A process's sockets close before its end is reported, and its peer then kills it as unreachable."""
        handle = self.launch(platform, end_main_thread)
        eventually(lambda: is_exiting(handle.pid), what="the process's exit")
        assert handle.describe() is None
        handle.kill("it cannot be reached")
        end = self.end_of(platform, handle)
        assert (end.killed_for, end.signal) == ("", signal.SIGKILL)
        assert "was ended by SIGKILL" in str(end)

    def test_each_of_several_ends_is_reported_once(self, platform: Platform) -> None:
        handles = [self.launch(platform, sleep, TIMEOUT_S, name=f"one-{place}") for place in range(3)]
        for handle in reversed(handles):
            handle.kill()
            assert self.ended(platform) == [handle]
        again = self.launch(platform, sleep, TIMEOUT_S, name="one-0")
        again.kill()
        assert self.ended(platform) == [again]

    def test_any_thread_may_wait_and_kill(self, platform: Platform) -> None:
        ended: list[Handle] = []
        thread = threading.Thread(target=lambda: ended.extend(self.ended(platform)))
        thread.start()
        handle = self.launch(platform, sleep, TIMEOUT_S)
        handle.kill()
        thread.join()
        assert ended == [handle]

    def test_a_long_exit_report_is_cut(self, platform: Platform, tmp_path: Path) -> None:
        path = str(tmp_path / "report")
        text = "alas " * MAX_REPORT_CHARS
        end = self.end_of(platform, self.launch(platform, write_and_die, path, text, report_file=path))
        assert (end.code, end.signal) == (None, signal.SIGTERM)
        assert 0 < len(end.report) <= MAX_REPORT_CHARS
        assert "SIGTERM" in str(end)
        assert "its exit report:\nalas" in str(end)

    def test_handlers_of_the_starter_do_not_run_in_its_processes(self, platform: Platform) -> None:
        """A script may save a checkpoint on SIGTERM, and asyncio's loop is woken by a descriptor that forks inherit."""
        hears, wakes_up = socket.socketpair()
        wakes_up.setblocking(False)
        before = signal.signal(signal.SIGTERM, lambda *_: os._exit(15)), signal.signal(signal.SIGUSR1, lambda *_: None)
        woken = signal.set_wakeup_fd(wakes_up.fileno())
        try:
            end = self.end_of(platform, self.launch(platform, raise_signals, signal.SIGUSR1, signal.SIGTERM))
        finally:
            signal.set_wakeup_fd(woken)
            signal.signal(signal.SIGTERM, before[0])
            signal.signal(signal.SIGUSR1, before[1])
        with hears, wakes_up:
            assert end.signal in (signal.SIGTERM, signal.SIGUSR1)
            hears.setblocking(False)
            with suppress(BlockingIOError):  # SIGCHLD has a handler in some processes
                assert not {signal.SIGTERM, signal.SIGUSR1} & set(hears.recv(1024))

    def test_closing_ends_processes_that_ignore_sigterm_too(self, platform: Platform, listener: socket.socket) -> None:
        deaf = self.launch(platform, ignore, int(signal.SIGTERM), listener.getsockname(), name="deaf")
        assert received(listener) == b"ready"
        idle = self.launch(platform, sleep, TIMEOUT_S, name="idle")
        platform.close(grace_s=0.2)
        ends = [handle.describe() for handle in (deaf, idle)]
        assert [end is not None and end.code for end in ends] == [None, None]
        platform.close()

    def test_closing_releases_every_descriptor(self) -> None:
        with closing(self.new_platform()) as platform:  # opens what all platforms share
            self.end_of(platform, self.launch(platform, leave, 0))
        before = set(os.listdir("/proc/self/fd"))
        platform = self.new_platform()
        self.end_of(platform, self.launch(platform, leave, 0))
        self.launch(platform, sleep, TIMEOUT_S)
        platform.close()
        del platform
        assert set(os.listdir("/proc/self/fd")) <= before

    def test_no_process_outlives_its_starter(self, listener: socket.socket) -> None:
        starter = self.starter.Process(target=start_and_stay, args=(self.new_platform, listener.getsockname()))
        starter.start()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            assert connection.recv(4) == b"held"
            starter.kill()
            starter.join()
            assert connection.recv(1) == b"", "the process has ended"

    def test_memory_is_shared(self, platform: Platform, listener: socket.socket) -> None:
        self.launch(platform, lend, listener.getsockname())
        handshake = decode(received(listener))
        assert isinstance(handshake, WorkerHandshake)
        assert handshake.probe is not None
        with closing(ArenaReader(handshake.pid)) as reader:
            assert reader.probe(handshake.probe)

    def test_connections_are_accepted(self, platform: Platform, listener: socket.socket) -> None:
        self.launch(platform, answer, listener.getsockname())
        port = int(received(listener))
        answered = b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            answered = connection.recv(16)
        assert answered == b"here"


def wakes(platform: Platform | RemotePlatform, within_s: float) -> bool:
    """Return whether an end is reported within this time."""
    poller = select.poll()
    poller.register(platform.wakeup_fd, select.POLLIN)
    return bool(poller.poll(within_s * 1000))


def received(listener: socket.socket) -> bytes:
    """All bytes that the next connection to `listener` sends."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
