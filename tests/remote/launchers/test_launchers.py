"""Every launcher of ours keeps the contract of workers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.contracts.launchers import PROGRAM, SECRET, LauncherContract, caller, launch_spec_to, name_of
from tests.contracts.processes import TIMEOUT_S
from tests.shared_cluster import wait
from tests.support.hosts import Hosts, HostsLauncher
from torch_dpflow.errors import PlatformError, RejectedError
from torch_dpflow.remote.launchers.contract import Fate, Launcher
from torch_dpflow.remote.launchers.processes import SubprocessLauncher


class TestSubprocesses(LauncherContract):
    def new_launcher(self, module: str) -> Launcher:
        return SubprocessLauncher(module)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        return {RejectedError: lambda: SubprocessLauncher(PROGRAM, python="/nowhere/python")}

    def test_a_launch_spec_is_nowhere_to_be_read_once_it_was_taken(
        self, launcher: Launcher, listener: socket.socket
    ) -> None:
        pid = launcher.start(name_of(0), launch_spec_to(listener), deadline_s=TIMEOUT_S)
        with caller(listener):
            kept = [Path(f"/proc/{pid}/{file}").read_bytes() for file in ("environ", "cmdline", "fd/0")]
            assert not [text for text in kept if SECRET.encode() in text]

    def test_another_launcher_finds_a_worker_as_soon_as_it_is_started(self, tmp_path: Path) -> None:
        # The new program has no environment for its first moments, in which its starter may die.
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\nexec sleep 100")
        program.chmod(0o700)
        many = {f"VARIABLE_{number}": "1" for number in range(20_000)}  # which the kernel takes some time to count
        with (
            closing(SubprocessLauncher(PROGRAM, python=str(program), env=many)) as one,
            closing(self.new_launcher("")) as other,
        ):
            refs = {}
            for name in map(name_of, range(20)):
                refs[name] = one.start(name, b"", deadline_s=TIMEOUT_S)
                assert other.look({name: refs[name]}) == {name: Fate()}
                last = one.start(f"{name}0", b"", deadline_s=TIMEOUT_S)
                assert other.list(f"{name}0") == {f"{name}0": last}
                one.stop(f"{name}0", last)
            for name, ref in refs.items():
                one.stop(name, ref)
            assert all(fate.end is not None for fate in other.look(refs).values())


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.hosts
class TestOtherHosts(LauncherContract):
    @pytest.fixture(autouse=True)
    def elsewhere(self, hosts: Hosts) -> Iterator[None]:
        self.near, self.hosts = hosts.address, hosts
        yield
        wait(lambda: not [pid for host in hosts for pid in host.pids()], what="the workers' end")

    def new_launcher(self, module: str) -> Launcher:
        prefixes = [host.prefix for host in self.hosts]
        return HostsLauncher(prefixes, module, env={"PYTHONPATH": str(Path(__file__).parents[3])})
