"""A fleet, the calls of a platform, and workers that are real processes: they fit together."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.contracts.launchers import PROGRAM, launch_spec_to
from tests.contracts.platforms import wakes
from tests.shared_cluster import PATIENCE_S
from torch_dpflow.remote.fleet.lifecycle import Fleet
from torch_dpflow.remote.fleet.worker_states import (
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    FleetInstruction,
    RejectWorker,
    StartWorker,
    StopWorker,
    WorkerState,
)
from torch_dpflow.remote.launchers.contract import Accepted, Ended, Outcome, prefix_of
from torch_dpflow.remote.launchers.processes import Processes, SubprocessLauncher
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform

CLUSTER, GROUP = "f1ee7000", "00000000aa"


class Provisioner:
    """The shell of one fleet, as small as it can be: a worker lives as long as its connection."""

    def __init__(self, platform: ThreadedPlatform, listener: socket.socket) -> None:
        self.platform, self.listener = platform, listener
        self.fleet = Fleet(prefix_of(CLUSTER, GROUP), platform.limits, draw=lambda: 0.5)
        self.connections: dict[str, socket.socket] = {}
        self.refs: dict[str, str] = {}
        self.started: list[str] = []
        self.admitted: list[str] = []

    def obey(self, instructions: list[FleetInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartWorker(name):
                    self.started.append(name)
                    self.platform.start(name, launch_spec_to(self.listener, name=name))
                case AdmitWorker(name):
                    self.admitted.append(name)
                case CheckWorker(name):
                    self.platform.suspect(name)
                case StopWorker(name, why):
                    self.platform.stop(name, why)
                case DrainWorker(name) | RejectWorker(name):
                    self.connections.pop(name).close()  # which has it leave
                    self.fleet.goodbye(name, time.monotonic())

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.fleet.workers
            watched = [self.listener, self.platform.wakeup_fd, *self.connections.values()]
            readable, _, _ = select.select(watched, [], [], 0.2)
            if self.listener in readable:
                self.welcome()
            for name, connection in [*self.connections.items()]:
                if connection in readable:
                    self.connections.pop(name).close()
                    self.fleet.goodbye(name, time.monotonic())
            for outcome in self.platform.take():
                if isinstance(outcome, Accepted):
                    self.refs[outcome.name] = outcome.ref
                self.fleet.handle(outcome, time.monotonic())
            self.obey(self.fleet.tick(time.monotonic()))

    def welcome(self) -> None:
        connection, _ = self.listener.accept()
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        name = json.loads(connection.recv(size, socket.MSG_WAITALL))["name"]
        self.connections[name] = connection
        self.fleet.arrived(name, "", time.monotonic())
        self.fleet.ready(name)

    def working(self) -> list[str]:
        return [one.name for one in self.fleet.workers if one.state is WorkerState.WORKING]


@pytest.fixture
def provisioner() -> Iterator[Provisioner]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        with closing(ThreadedPlatform(SubprocessLauncher(PROGRAM))) as platform:
            provisioner = Provisioner(platform, listener)
            yield provisioner
        for connection in provisioner.connections.values():
            connection.close()


def test_a_fleet_survives_kills_and_leaves_nothing(provisioner: Provisioner) -> None:
    provisioner.fleet.target(3)
    provisioner.run_until(lambda: len(provisioner.working()) == 3)
    victim = provisioner.working()[1]
    os.kill(int(provisioner.refs[victim]), signal.SIGKILL)
    provisioner.run_until(lambda: victim not in provisioner.working() and len(provisioner.working()) == 3)
    assert provisioner.working()[-1] == f"{prefix_of(CLUSTER, GROUP)}1-4"
    provisioner.fleet.target(1)
    provisioner.run_until(lambda: len(provisioner.fleet.workers) == 1)
    provisioner.fleet.target(0)
    provisioner.run_until(lambda: not provisioner.fleet.workers)
    assert len(set(provisioner.started)) == len(provisioner.started) == 4
    assert sorted(provisioner.admitted) == sorted(provisioner.started)
    assert provisioner.connections == {}
    with closing(SubprocessLauncher(PROGRAM)) as stranger:
        assert stranger.list(prefix_of(CLUSTER)) == {}


def test_the_end_of_a_worker_that_never_called_is_told_unasked(tmp_path: Path) -> None:
    """As where it lacks a module: nobody suspects it before its start has taken too long."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named torch_dpflow >&2\nexit 3\n")
    python.chmod(0o700)
    with closing(Processes(python=str(python)).open()) as platform:
        platform.start(f"{prefix_of(CLUSTER, GROUP)}0-1", b"{}")
        told: list[Outcome] = []
        while not any(isinstance(one, Ended) for one in told):
            assert wakes(platform, 20.0), told
            told += platform.take()
    assert isinstance(told[-1], Ended)
    assert told[-1].end.code == 3
    assert "no module named torch_dpflow" in told[-1].end.report
