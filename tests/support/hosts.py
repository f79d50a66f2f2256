"""Other hosts on this machine: what runs there has an address of its own and can be cut off, slowed down and frozen.

::

    with Hosts(2, rtt_s=0.02) as hosts:
        loader = DPFlowDataLoader(dataset, num_workers=4, platform=OnHosts.of(hosts))

A host is a set of namespaces: of processes, so nothing there can map this host's memory or signal its processes; of the
network, with one link to this host; of mounts, with its own temporary directory. Other files and the processors are
shared. It takes root, util-linux and iproute2: `missing` says what is not there.

Nothing outlives the process that has made a host, however that ends: the host's first process reads a pipe from it, and
when that closes the kernel ends all processes of the host and removes its links, addresses and mounts.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.contract import AdoptingPlatform, Launcher
from torch_dpflow.remote.launchers.processes import SubprocessLauncher
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform

#: Where a host's own temporary directory is, there: a place that every Linux has.
FOLDER = "/mnt"
#: The name of its link, there.
DEVICE = "eth0"
#: Networks are numbered: 198.18.0.0/15 is set aside for measurements like these (RFC 2544).
_NETWORKS = 512
#: How long a host's processes may take to stop or end, seconds.
_PATIENCE_S = 60.0
#: The command that is a host's first process; whatever is left there ends with it.
_FIRST = f"mount -t tmpfs none /dev/shm && mount -t tmpfs none {FOLDER} && echo && read _"
_UNSHARE = ("unshare", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
#: Processes read their state, as /proc tells it: stopped by a signal.
_STOPPED = "T"


@cache
def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    for command, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(command) is None:
            return f"network namespaces take the command `{command}` (Debian: {package})"
    try:
        Hosts(1).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no host can be made: {getattr(error, 'stderr', '') or error}".strip()
    return ""


class Host:
    """One host; `Hosts` makes it.

    Args:
        name: of its link, on this side.
        near: this host's address, as seen from there.
        address: its own.
        rtt_s: what a round trip takes, seconds.
        loss: the share of packets that get lost, each way.

    Raises:
        CalledProcessError: the kernel does not allow it.
    """

    def __init__(self, name: str, near: str, address: str, *, rtt_s: float = 0.0, loss: float = 0.0) -> None:
        self.name, self.address = name, address
        self._near = near
        self._stack = ExitStack()
        self._rates: dict[str, str] = {}
        self._relay: subprocess.Popen[bytes] | None = None
        try:
            first = self._start(*_UNSHARE, "sh", "-c", _FIRST)
            (self._first,) = _children(first.pid)
            self._namespace = os.readlink(f"/proc/{self._first}/ns/pid")
            self._connect(rtt_s, loss)
        except BaseException:
            self.close()
            raise

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command there, as the child of a process here, which ends as it does."""
        return (*self.network_prefix, "--pid", "--uts", "--mount", _path_of("env"), f"TMPDIR={FOLDER}")

    @property
    def network_prefix(self) -> tuple[str, ...]:
        """Runs a command with its network alone, as a process of this host."""
        return (_path_of("nsenter"), f"--target={self._first}", "--net")

    @property
    def folder(self) -> Path:
        """Its temporary directory, as seen from here."""
        return Path(f"/proc/{self._first}/root{FOLDER}")

    def pids(self) -> list[int]:
        """Its processes, without the first, as they are numbered here."""
        found = []
        for entry in os.listdir("/proc"):
            with suppress(OSError):  # it has ended
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == self._namespace:
                    found.append(int(entry))
        return [pid for pid in found if pid != self._first and _state(pid)]

    # --- the link ---

    def cut(self, *, towards: str = "") -> None:
        """Nothing gets through any more, and nobody is told.

        towards: "here" or "there": what is sent in the other direction still arrives.
        """
        if not towards:
            self._there("ip", "link", "set", DEVICE, "down")
        else:  # a queue that has no room for any packet
            self._queue(towards, "rate", "8bit", "burst", "1b", "limit", "1b")

    def mend(self) -> None:
        """The link is there again, as fast as it was."""
        self._there("ip", "link", "set", DEVICE, "up")
        for towards in ("here", "there"):
            self._limit(towards)

    def delay(self, rtt_s: float) -> None:
        """A round trip takes so long from now on. For hosts whose link was made with latency or loss."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{rtt_s / 2}\n".encode())
        self._relay.stdin.flush()

    def limit(self, bits_per_s: float | None) -> None:
        """So much gets through at most, in each direction; None: as much as can."""
        for towards in ("here", "there"):
            self._rates[towards] = "" if bits_per_s is None else f"{bits_per_s:.0f}bit"
            self._limit(towards)

    def _limit(self, towards: str) -> None:
        rate = self._rates.get(towards, "")
        if rate:
            burst = max(1 << 17, int(rate.removesuffix("bit")) // 800)  # of 10 ms, and above the largest packet
            self._queue(towards, "rate", rate, "burst", f"{burst}b", "latency", "50ms")
        else:
            with suppress(subprocess.CalledProcessError):  # there is none
                self._at(towards, "tc", "qdisc", "delete", "dev", self._device(towards), "root")

    def _queue(self, towards: str, *tbf: str) -> None:
        self._at(towards, "tc", "qdisc", "replace", "dev", self._device(towards), "root", "tbf", *tbf)

    def _device(self, towards: str) -> str:
        return DEVICE if towards == "here" else self.name

    def _at(self, towards: str, *command: str) -> None:
        """Run a command where packets in this direction are sent."""
        {"here": self._there, "there": _run}[towards](*command)

    # --- its processes ---

    def freeze(self) -> None:
        """Stop all its processes, as a paused machine does, until `thaw`."""
        pids = self.pids()
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        _await(lambda: all(_state(pid) in ("", _STOPPED) for one in pids for pid in (one, *_outside(one))))

    def thaw(self) -> None:
        """Let them go on."""
        for one in self.pids():
            for pid in (*_outside(one), one):
                _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """End all its processes and take everything away. Idempotent."""
        self._stack.close()

    # --- making it ---

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a process that tells by a line that it is ready, and that ends when its input does."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        self._stack.enter_context(process)  # closes its output, and waits for its end
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stack.callback(process.kill)
        if not process.stdout.readline():
            raise subprocess.CalledProcessError(
                process.wait(), command, stderr=process.stderr.read().decode(errors="replace")
            )
        return process

    def _connect(self, rtt_s: float, loss: float) -> None:
        if rtt_s or loss:
            relay = (sys.executable, "-m", "tests.support.relay")
            self._relay = self._start(*relay, self.name, f"{self.name}x", f"{rtt_s / 2}", f"{loss}")
            _run("ip", "link", "set", f"{self.name}x", "netns", f"{self._first}", "name", DEVICE)
        else:
            _run(
                *("ip", "link", "add", self.name, "type", "veth"),
                *("peer", "name", DEVICE, "netns", f"{self._first}"),
            )
            # With the host's last process, but that may take a while.
            self._stack.callback(
                subprocess.run, ("ip", "link", "delete", self.name), check=False, stderr=subprocess.DEVNULL
            )
        _run("ip", "address", "add", self._near, "peer", self.address, "dev", self.name)
        _run("ip", "link", "set", self.name, "up")
        self._there("ip", "link", "set", "lo", "up")
        self._there("ip", "address", "add", self.address, "peer", self._near, "dev", DEVICE)
        self._there("ip", "link", "set", DEVICE, "up")

    def _there(self, *command: str) -> None:
        _run(*self.network_prefix, *command)


class Hosts(Sequence[Host]):
    """So many hosts, each with a link to this one, which all of them reach at `address`.

    Args:
        count: of hosts, at most 250.
        rtt_s: what a round trip takes, seconds, as `relay` has it.
        loss: the share of packets that get lost, each way.

    Raises:
        CalledProcessError: the kernel does not allow it.
    """

    def __init__(self, count: int, *, rtt_s: float = 0.0, loss: float = 0.0) -> None:
        self._claim, number = _claim_network()
        subnet = f"198.{18 + number // 256}.{number % 256}"
        self.address = f"{subnet}.1"
        self._hosts: list[Host] = []
        try:
            for host in range(count):
                names = f"dpf{number}-{host}", self.address, f"{subnet}.{host + 2}"
                self._hosts.append(Host(*names, rtt_s=rtt_s, loss=loss))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, index: int) -> Host:  # type: ignore[override]
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hosts away. Idempotent."""
        for host in self._hosts:
            host.close()
        self._claim.close()


class HostsLauncher(SubprocessLauncher):
    """Members on other hosts, dealt out by their numbers.

    Args:
        prefixes: of each host, what runs a command there.
        module, env: as of `SubprocessLauncher`.
        starts_per_s: how many members to start a second, which all begin by importing torch.
    """

    def __init__(
        self,
        prefixes: Sequence[tuple[str, ...]],
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        starts_per_s: float = SubprocessLauncher.limits.starts_per_s,
    ) -> None:
        super().__init__(module, env=env)
        self.limits = replace(SubprocessLauncher.limits, starts_per_s=starts_per_s)
        self._prefixes = prefixes

    def _command_of(self, name: str) -> tuple[str, ...]:
        return (*self._prefixes[int(name.split("-")[3]) % len(self._prefixes)], *self._command)


@dataclass(frozen=True, kw_only=True)
class OnHosts:
    """What a loader takes as `platform=` to have its workers on other hosts.

    Args:
        address: where they reach this one.
        prefixes: of each host, what runs a command there.
        env: variables for members, beside those of this process.
        starts_per_s: how many members to start a second.
    """

    address: str
    prefixes: tuple[tuple[str, ...], ...]
    env: Mapping[str, str] = field(default_factory=dict)
    starts_per_s: float = SubprocessLauncher.limits.starts_per_s

    name = "hosts"
    sends_code = True

    @classmethod
    def of(cls, hosts: Hosts, **settings: Any) -> OnHosts:
        """As the constructor, for these hosts."""
        return cls(address=hosts.address, prefixes=tuple(host.prefix for host in hosts), **settings)

    def check_installed(self) -> None:
        """Nothing: there is no library."""

    def check_workers(self, workers: int) -> None:
        """Nothing: it costs nothing."""

    def launcher(self) -> Launcher:
        # Only the package itself: all else comes with the bundle, as it does on other machines.
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        env = {**path, **self.env}
        return HostsLauncher(self.prefixes, "torch_dpflow.remote.worker", env=env, starts_per_s=self.starts_per_s)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        return ThreadedPlatform(self.launcher())

    def listen_at(self) -> str:
        return f"tcp://{self.address}:0"

    def check_listen(self, address: str) -> None:
        if not address.startswith(f"tcp://{self.address}:"):
            raise OptionError(f"listen={address!r}: the hosts reach this one at tcp://{self.address}:0")


def member_python(host: Host, folder: Path) -> Path:
    """An interpreter for members on a host, as a cluster's platform takes one by its name.

    It is for `dpflow up --platform processes`, in the variable `DPFLOW_PLATFORM_PROCESSES_PYTHON`, with
    `--worker-listen tcp://ADDRESS:0`; `folder` is where it is written.
    """
    command = [*host.prefix, f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable]
    path = folder / "python-there"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return path


def _claim_network() -> tuple[socket.socket, int]:
    """The number of a network that no other process has, as long as the socket is open."""
    begin = secrets.randbelow(_NETWORKS)
    for number in (*range(begin, _NETWORKS), *range(begin)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0dpflow-hosts-{number}")
        except OSError:
            claim.close()
            continue
        return claim, number
    raise OSError(f"all {_NETWORKS} networks are in use")


def _outside(pid: int) -> Iterator[int]:
    """The process of this host that waits for a host's process, if there is one: it stops and ends with it."""
    with suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text() == "nsenter\n":
            yield parent


def _state(pid: int) -> str:
    """A letter of proc(5); empty if the process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state == "Z" else state


def _await(condition: object) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("the processes of a host do not stop")
        time.sleep(0.001)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@cache
def _path_of(command: str) -> str:
    return shutil.which(command) or command


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
