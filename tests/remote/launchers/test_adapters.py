"""Every adapter of ours keeps the contract of members."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.shared_cluster import wait
from tests.support.hosts import Hosts, HostsAdapter
from torch_dpflow.errors import PlatformError, RejectedError
from torch_dpflow.remote.launchers.contract import Adapter
from torch_dpflow.remote.launchers.subprocesses import SubprocessAdapter
from torch_dpflow.testing.adapters import PROGRAM, SECRET, AdapterContract, caller, name_of, order_to
from torch_dpflow.testing.processes import PATIENCE_S


class TestSubprocesses(AdapterContract):
    def new_adapter(self, module: str) -> Adapter:
        return SubprocessAdapter(module)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Adapter]]:
        return {RejectedError: lambda: SubprocessAdapter(PROGRAM, python="/nowhere/python")}

    def test_an_order_is_nowhere_to_be_read_once_it_was_taken(
        self, adapter: Adapter, door: socket.socket
    ) -> None:
        pid = adapter.start(name_of(0), order_to(door), deadline_s=PATIENCE_S)
        with caller(door):
            kept = [Path(f"/proc/{pid}/{file}").read_bytes() for file in ("environ", "cmdline", "fd/0")]
            assert not [text for text in kept if SECRET.encode() in text]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.hosts
class TestOtherHosts(AdapterContract):
    @pytest.fixture(autouse=True)
    def elsewhere(self, hosts: Hosts) -> Iterator[None]:
        self.near, self.hosts = hosts.address, hosts
        yield
        wait(lambda: not [pid for host in hosts for pid in host.pids()], what="the members' end")

    def new_adapter(self, module: str) -> Adapter:
        prefixes = [host.prefix for host in self.hosts]
        return HostsAdapter(prefixes, module, env={"PYTHONPATH": str(Path(__file__).parents[3])})
