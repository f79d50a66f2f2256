"""Batches from several pool servers, each behind a slow link of its own.

    python -m benchmarks.pool_links [--json | --markdown] [--rounds N] [--quick]

Servers run in network namespaces, each behind a link of 100 Mbit/s; the reader is here. It takes root and iproute2.
Random batches of 256 records of 110 kB, in plain over tcp, from one, two, four and eight servers; "of the links" is
the rate of the batches divided by the sum of the links' rates.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.pool_sides import RECORD_BYTES, process
from benchmarks.read_batch import publish_records
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from tests.support.hosts import FOLDER, Host, Hosts, missing
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_reader import DataReader

BITS_PER_S = 100e6
SERVERS = (1, 2, 4, 8)
METRICS = [
    Metric(name="records_per_s", label="records/s", spec=",.0f"),
    Metric(name="share", label="of the links", spec=".3f"),
]


@contextmanager
def serving(host: Host, keys: Path, memory_bytes: int) -> Iterator[str]:
    """Run a server on a host, whose memory this process cannot map; yields the address at which it listens."""
    command = [*host.prefix, sys.executable, "-m", "torch_dpflow.cli", "pool", "serve"]
    listen = ["--listen", f"tcp://{host.address}:0"]
    options = ["--memory", f"{memory_bytes}B", "--address", f"{FOLDER}/pool", "--connection", str(keys)]
    with process([*command, *options, "--trust-network", *listen]) as (said, _):
        yield said.split(" and at ")[1].partition(",")[0].strip()


def run_servers(batches: int, rounds: int) -> Comparison:
    """From one server and from more."""
    with ExitStack() as stack:
        keys, stored = _prepared(stack, 512)
        size, identity = 2 * RECORD_BYTES * len(stored), identity_of(stored)
        owners = list[str]()
        for host in stack.enter_context(Hosts(max(SERVERS))):
            owners.append(stack.enter_context(serving(host, keys, size)))
            DataClient(owners[-1], connection=keys, trust_network=True).preload(stored)
            host.limit(BITS_PER_S)
        pool = find_address(owners[0], keys, trust_network=True)
        reader = stack.enter_context(closing(DataReader(pool, silence_s=60.0)))
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


def _prepared(stack: ExitStack, count: int) -> tuple[Path, StoredDataset]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_connection_file(folder / "keys", generate_keys("", certificates=True))
    return folder / "keys", publish_records(DatasetStore.create(str(folder / "datasets")), count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_links", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if what := missing():
        parser.error(what)
    rounds, batches = (1, 2) if arguments.quick else (arguments.rounds, 8)
    publish([run_servers(batches, rounds)], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
