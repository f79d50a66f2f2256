"""A switch port that many servers answer through: real TCP, in network namespaces, for `benchmarks.incast`.

    servers' namespace, 32 addresses ── bridge ── 100 Mbit/s, 64 KiB of buffer ── reader's namespace

The buffer is that of the bridge's port: one of the sender's own device would tell TCP what it drops. Segments leave the
servers one by one (no offloading), and connections use cubic, by their route. It takes root and iproute2.

    python -m benchmarks.incast_line SIDE BATCHES SEED ADDRESS... in the reader's namespace: prints figures as JSON
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.incast_network import PAYLOAD_BYTES, Line
from benchmarks.pool_sides import process
from benchmarks.staged_window import StagedWindow, Unbounded
from torch_dpflow.pool.planning.request_window import BatchWindow, MeasuredWindow
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_reader import DataReader

SERVERS, BATCH, RECORD_BYTES, RECORDS, PORT = 32, 64, 16_000, 512, 7400
ADDRESSES = [f"tcp://10.99.0.{number + 1}:{PORT}" for number in range(SERVERS)]
LINE = Line()


def windows() -> Mapping[str, BatchWindow]:
    """A new one for each side."""
    idle = LINE.round_trip_s + RECORD_BYTES / LINE.payload_per_s
    return {
        "at once": Unbounded(),
        "Algorithm 1, repaired": StagedWindow(
            bytes_per_s=LINE.payload_per_s, latency_s=idle, record_bytes=RECORD_BYTES
        ),
        "ours": MeasuredWindow(),
    }


class SwitchedLine:
    """The namespaces, while they are there."""

    def __init__(self, name: str) -> None:
        self.servers, self.switch, self.reader = (f"{name}{part}" for part in ("s", "b", "r"))

    def counted(self) -> dict[str, int]:
        """Retransmission timers that have run out at the servers, and packets that the port has dropped."""
        with_names = _run("ip", "netns", "exec", self.servers, "cat", "/proc/net/netstat").splitlines()
        names, values = (line.split() for line in with_names if line.startswith("TcpExt:"))
        port = _run("ip", "netns", "exec", self.switch, "tc", "-s", "qdisc", "show", "dev", "reader")
        (dropped,) = re.findall(r"dropped (\d+)", port)
        return {"timeouts": int(dict(zip(names, values))["TCPTimeouts"]), "drops": int(dropped)}


@contextmanager
def switched_line() -> Iterator[SwitchedLine]:
    """Make the namespaces, and take them away."""
    line = SwitchedLine(f"dpf{os.getpid()}")
    try:
        for name in (line.servers, line.switch, line.reader):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", line.switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", line.switch, "link", "set", "switch", "up")
        for end, port in ((line.servers, "servers"), (line.reader, "reader")):
            _run(
                *("ip", "link", "add", "eth0", "netns", end, "type", "veth"),
                *("peer", "name", port, "netns", line.switch),
            )
            _run("ip", "-n", line.switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", end, "link", "set", "eth0", "up", "gso_max_segs", "1")
        for number in range(SERVERS):
            _run("ip", "-n", line.servers, "address", "add", f"10.99.0.{number + 1}/16", "dev", "eth0")
        _run("ip", "-n", line.reader, "address", "add", "10.99.1.1/16", "dev", "eth0")
        for end in (line.servers, line.reader):
            _run(
                "ip",
                "-n",
                end,
                "route",
                "add",
                "10.99.0.0/16",
                "dev",
                "eth0",
                "metric",
                "1",
                "congctl",
                "cubic",
            )
        rate = ("rate", f"{LINE.bits_per_s:.0f}bit", "burst", "3028", "limit", f"{LINE.buffer_bytes}")
        _run("ip", "netns", "exec", line.switch, "tc", "qdisc", "add", "dev", "reader", "root", "tbf", *rate)
        yield line
    finally:
        for name in (line.servers, line.switch, line.reader):
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)


@contextmanager
def incast_servers(line: SwitchedLine, folder: Path) -> Iterator[None]:
    """A server of the pool that is found at all 32 addresses; who uses it loads what it is to hold."""
    command = ["ip", "netns", "exec", line.servers, sys.executable, "-m", "torch_dpflow.cli", "pool", "serve"]
    options = ["--memory", "64MiB", "--address", str(folder / "pool"), "--connection", str(folder / "keys")]
    listen = [part for one in ADDRESSES for part in ("--listen", one)]
    with process([*command, *options, "--trust-network", *listen]):
        yield


def measure_line(
    line: SwitchedLine, side: str, batches: int, seed: int, folder: Path, identity: bytes
) -> dict[str, float]:
    """One reader reads so many batches; shares of the line's rate."""
    before = line.counted()
    arguments = [side, f"{batches}", f"{seed}", str(folder / "keys"), identity.hex()]
    command = ["ip", "netns", "exec", line.reader, sys.executable, "-m", "benchmarks.incast_line", *arguments]
    seconds = json.loads(_run(*command))
    after = line.counted()
    ideal = BATCH * -(-RECORD_BYTES // PAYLOAD_BYTES) * PAYLOAD_BYTES / LINE.payload_per_s
    return {
        "share": ideal * batches / sum(seconds),
        "worst": ideal / max(seconds),
        **{name: (after[name] - before[name]) / (batches + 1) for name in before},
    }


def _read(side: str, batches: int, seed: int, keys: str, identity: bytes) -> list[float]:
    """Seconds of each batch, but a first one."""
    pool = find_address(ADDRESSES[0], keys, trust_network=True)
    chance, seconds = np.random.default_rng(seed), list[float]()
    with closing(DataReader(pool, silence_s=30.0, window=windows()[side])) as reader:
        for _ in range(batches + 1):
            indices = chance.permutation(RECORDS)[:BATCH].tolist()
            owners = [ADDRESSES[index % SERVERS] for index in indices]
            begun = time.perf_counter()
            found = reader.read(identity, owners, [WantedRecord(one, RECORD_BYTES) for one in indices])
            seconds.append(time.perf_counter() - begun)
            assert None not in found
    return seconds[1:]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    side, batches, seed, keys, identity = sys.argv[1:]
    print(json.dumps(_read(side, int(batches), int(seed), keys, bytes.fromhex(identity))))
