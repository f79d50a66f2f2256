"""Servers of the pool behind slow links: several servers, and one server over two network cards.

    python -m benchmarks.pool_links [--json | --markdown] [--rounds N] [--part servers|rails] [--quick]

Servers run in network namespaces, each behind a link of 100 Mbit/s; the reader is here. It takes root and iproute2.
Records of 110 kB, in plain over tcp. servers: random batches of 256 from one, two, four and eight; "of the links" is
what comes by the sum of their rates. rails: random batches of 64 by a `PooledDataset` from one server that listens at
two addresses, each on a link of its own: over one of them, over both, and over both of which one is cut, without a
word, in the midst of each round; "longest" is the longest batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.pool_sides import RECORD_BYTES, content_of, process
from benchmarks.read_batch import publish_records
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from tests.support.hosts import FOLDER, Host, Hosts, missing
from torch_dpflow import PooledDataset
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.lanes.lane_reader import LaneReader
from torch_dpflow.pool.lanes.pool_address import find_address
from torch_dpflow.pool.lanes.rails import RAILS_VARIABLE
from torch_dpflow.pool.lanes.stream_lane import WantedRecord
from torch_dpflow.pool.sources.set_names import identity_of

BITS_PER_S = 100e6
SERVERS = (1, 2, 4, 8)
METRICS = [
    Metric(name="records_per_s", label="records/s", spec=",.0f"),
    Metric(name="share", label="of the links", spec=".3f"),
    Metric(name="longest_s", label="longest, s", higher_is_better=False, spec=".2f"),
    Metric(name="wrong", label="wrong", higher_is_better=False, spec=".0f"),
    Metric(name="storage", label="from storage", higher_is_better=False, spec=".0f"),
]


class SecondLink:
    """A further link of a host, as fast as the first; `Host` makes one.

    Raises CalledProcessError: the kernel does not allow it.
    """

    def __init__(self, host: Host) -> None:
        self.name = f"dps{os.getpid()}"
        net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.address = f"{net}.2"
        self._there = host.network_prefix
        pid = host.network_prefix[1].partition("=")[2]
        _run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth1", "netns", pid)
        ends = ((), self.name, f"{net}.1", self.address), (self._there, "eth1", self.address, f"{net}.1")
        rate = ("rate", f"{BITS_PER_S:.0f}bit", "burst", f"{1 << 17}b", "latency", "50ms")
        for where, device, own, peer in ends:
            _run(*where, "ip", "address", "add", own, "peer", peer, "dev", device)
            _run(*where, "ip", "link", "set", device, "up")
            _run(*where, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        _run(*self._there, "ip", "link", "set", "eth1", "down")

    def mend(self) -> None:
        """It is there again."""
        _run(*self._there, "ip", "link", "set", "eth1", "up")

    def close(self) -> None:
        """Take it away."""
        _run("ip", "link", "delete", self.name)


@contextmanager
def serving(host: Host, keys: Path, memory_bytes: int, addresses: Sequence[str]) -> Iterator[list[str]]:
    """A server on a host, whose memory nobody here can map, and where it listens."""
    command = [*host.prefix, sys.executable, "-m", "torch_dpflow.cli", "pool", "serve"]
    listen = [part for one in addresses for part in ("--listen", f"tcp://{one}:0")]
    options = ["--memory", f"{memory_bytes}B", "--address", f"{FOLDER}/pool", "--connection", str(keys)]
    with process([*command, *options, "--trust-network", *listen]) as (said, _):
        yield [part.partition(",")[0].strip() for part in said.split(" and at ")[1:]]


def run_servers(batches: int, rounds: int) -> Comparison:
    """From one server and from more."""
    with ExitStack() as stack:
        keys, stored = _prepared(stack, 512)
        size, identity = 2 * RECORD_BYTES * len(stored), identity_of(stored)
        owners = list[str]()
        for host in stack.enter_context(Hosts(max(SERVERS))):
            owners += stack.enter_context(serving(host, keys, size, [host.address]))
            DataClient(owners[-1], connection=keys, trust_network=True).preload(stored)
            host.limit(BITS_PER_S)
        pool = find_address(owners[0], keys, trust_network=True)
        reader = stack.enter_context(closing(LaneReader(pool, silence_s=60.0)))
        numbers = iter(range(1 << 30))

        def measure(count: int) -> Figures:
            chance, seconds = np.random.default_rng(next(numbers)), 0.0
            for number in range(batches + 1):
                indices = chance.permutation(len(stored))[:256].tolist()
                begun = time.perf_counter()
                wanted = [WantedRecord(one, RECORD_BYTES) for one in indices]
                found = reader.read(identity, [owners[one % count] for one in indices], wanted)
                seconds += (time.perf_counter() - begun) * bool(number)
                assert None not in found
            rate = batches * 256 / seconds
            return {"records_per_s": rate, "share": rate * RECORD_BYTES * 8 / BITS_PER_S / count}

        sides = {f"{count} servers": partial(measure, count) for count in SERVERS}
        return alternate("pool_links", "servers", sides, rounds=rounds)


def run_rails(batches: int, rounds: int) -> Comparison:
    """Over one link, over two, and over two of which one is cut."""
    with ExitStack() as stack:
        keys, stored = _prepared(stack, 256)
        (host,) = stack.enter_context(Hosts(1))
        second = stack.enter_context(closing(SecondLink(host)))
        places = [host.address, second.address]
        address, _ = stack.enter_context(serving(host, keys, 2 * RECORD_BYTES * len(stored), places))
        DataClient(address, connection=keys, trust_network=True).preload(stored)
        host.limit(BITS_PER_S)
        numbers = iter(range(1 << 30))

        def measure(rails: str, is_cut: bool) -> Figures:
            os.environ[RAILS_VARIABLE] = rails
            with closing(PooledDataset(stored, address, connection=keys, trust_network=True)) as dataset:
                return _read(dataset, batches, next(numbers), second if is_cut else None)

        sides = {
            "1 rail": partial(measure, host.name, False),
            "2 rails": partial(measure, f"{host.name},{second.name}", False),
            "2 rails, 1 cut": partial(measure, f"{host.name},{second.name}", True),
        }
        return alternate("pool_links", "rails", sides, rounds=rounds)


def _read(dataset: PooledDataset, batches: int, seed: int, cut: SecondLink | None) -> Figures:
    chance, seconds, wrong = np.random.default_rng(seed), list[float](), 0
    dataset.read_each(range(64))
    misses = dataset.misses
    for number in range(batches):
        indices = chance.permutation(len(dataset))[:64].tolist()
        since = time.perf_counter()
        if cut is not None and number == batches // 2:
            threading.Timer(0.1, cut.cut).start()
        samples = dataset.read_each(indices)
        seconds.append(time.perf_counter() - since)
        wrong += sum(
            not isinstance(one, tuple) or one[0] != content_of(index) for one, index in zip(samples, indices)
        )
    if cut is not None:
        cut.mend()
    read = {"records_per_s": batches * 64 / sum(seconds), "longest_s": max(seconds)}
    return {**read, "wrong": wrong, "storage": dataset.misses - misses}


def _prepared(stack: ExitStack, count: int) -> tuple[Path, StoredDataset]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_connection_file(folder / "keys", generate_keys("", certificates=True))
    return folder / "keys", publish_records(DatasetStore.create(str(folder / "datasets")), count)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_links", description=__doc__)
    add_arguments(parser)
    parts = {"servers": run_servers, "rails": run_rails}
    parser.add_argument(
        "--part", choices=[*parts], action="append", help="one of the workloads (default: both)"
    )
    arguments = parser.parse_args(argv)
    if what := missing():
        parser.error(what)
    rounds, batches = (1, 2) if arguments.quick else (arguments.rounds, 8)
    publish([parts[one](batches, rounds) for one in arguments.part or parts], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
