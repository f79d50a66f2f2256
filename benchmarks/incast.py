"""Reading batches from many servers at once over one line: everything at once, Algorithm 1 of the paper, our window.

    python -m benchmarks.incast [--simulate] [--json | --markdown] [--rounds N] [--quick]

Real TCP (`benchmarks.incast_line`, which takes root): 32 connections, one to each of 32 addresses of a server of the
pool, 100 Mbit/s, 64 KiB of buffer at the switch, batches of 64 records of 16 kB.

Simulated time (`--simulate`, `benchmarks.incast_network`): the same line with 0.2 ms there and back, 1 to 128 servers,
three sizes of records. No figure depends on the machine there; a round is another order of the records.

Algorithm 1 is repaired (`torch_dpflow.pool.planning.request_window` says of what) and told the line's rate and
latency; our window is told nothing. The paper states no figures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import incast_line
from benchmarks.incast_network import PAYLOAD_BYTES, Line, Network
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from benchmarks.staged_window import StagedWindow, Unbounded
from tests.support.hosts import missing
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.planning.layout import SampleLayout, identity, place
from torch_dpflow.pool.planning.request_window import BatchWindow, ConnectionQueues, MeasuredWindow
from torch_dpflow.pool.sources import identity_of

BATCH = 64
SERVERS = (1, 2, 4, 8, 16, 32, 64, 128)
#: More than any server is filled with.
SERVER_BYTES = 1 << 50
RECORDS, PER_STRIPE = 1 << 14, 16
METRICS = [
    Metric(name="share", label="of the line", spec=".3f"),
    Metric(name="worst", label="worst batch", spec=".3f"),
    Metric(name="timeouts", label="timeouts/batch", higher_is_better=False, spec=".2f"),
    Metric(name="drops", label="drops/batch", higher_is_better=False, spec=",.0f"),
]
Make = Callable[[Line, int], BatchWindow]


def _staged(line: Line, record_bytes: int) -> BatchWindow:
    idle = line.round_trip_s + record_bytes / line.payload_per_s
    return StagedWindow(bytes_per_s=line.payload_per_s, latency_s=idle, record_bytes=record_bytes)


SIDES: Mapping[str, Make] = {
    "at once": lambda line, record_bytes: Unbounded(),
    "Algorithm 1, repaired": _staged,
    "ours": lambda line, record_bytes: MeasuredWindow(),
}
SETS: Mapping[str, SampleLayout] = {
    "rows of 4 kB": SampleLayout(identity("array", {"rows": 4_000}), np.full(RECORDS, 4_000), PER_STRIPE),
    "files of 16 kB": SampleLayout(identity("files", {"bytes": 16_000}), np.full(RECORDS, 16_000), PER_STRIPE),
    "files of 110 kB": SampleLayout(identity("files", {"bytes": 110_000}), np.full(RECORDS, 110_000), PER_STRIPE),
}


class BatchReader:
    """A client that reads batches, one after the other, as its window grants."""

    def __init__(self, network: Network, records: SampleLayout, window: BatchWindow) -> None:
        self._network = network
        self._records = records
        self._window = window
        servers = {f"server-{number}": SERVER_BYTES for number in range(len(network.connections))}
        sizes = [records.stripe_bytes(stripe) for stripe in range(records.stripes)]
        self._owners = place(records.identity, sizes, servers)
        self._queues = ConnectionQueues([], [])
        self._servers, self._sizes = list[int](), list[int]()
        self._missing = 0

    def read(self, indices: Sequence[int]) -> float:
        """Read these; the seconds that it took."""
        begun = self._network.now
        self._servers = [self._owners[index // self._records.per_stripe] for index in indices]
        self._sizes = self._records.lengths[[*indices]].tolist()
        self._queues = ConnectionQueues([*map(str, self._servers)], self._sizes)
        self._missing = len(indices)
        self._ask()
        self._network.run_until(lambda: not self._missing)
        return self._network.now - begun

    def _ask(self) -> None:
        sizes = self._queues.sizes(BATCH)
        granted = self._window.grant(sizes, self._network.now, len(self._queues.connections))
        for number in self._queues.take(sum(sizes[:granted])) if granted else ():
            length, server = self._sizes[number], self._servers[number]
            token = self._window.requested(length, self._network.now)
            self._network.connections[server].request(length, partial(self._take, number, token))

    def _take(self, number: int, token: object) -> None:
        self._queues.received(number)
        self._window.arrived(token, self._network.now)
        self._missing -= 1
        self._ask()


def measure(records: SampleLayout, servers: int, make: Make, batches: int, seed: int) -> Figures:
    """One client reads so many batches; shares of the line's rate."""
    line = Line()
    network = Network(line, servers)
    length = int(records.lengths[0])
    reader = BatchReader(network, records, make(line, length))
    indices = np.random.default_rng(seed).permutation(records.records)[: batches * BATCH]
    seconds = [reader.read(batch.tolist()) for batch in np.split(indices, batches)]
    # In whole packets, which is what the line carries.
    ideal = BATCH * -(-length // PAYLOAD_BYTES) * PAYLOAD_BYTES / line.payload_per_s
    return {
        "share": ideal / statistics.fmean(seconds),
        "worst": ideal / max(seconds),
        "timeouts": network.timeouts / batches,
        "drops": network.drops / batches,
    }


def simulate(names: Sequence[str], servers: Sequence[int], batches: int, rounds: int) -> list[Comparison]:
    """Every side at every number of servers."""
    numbers: dict[tuple[str, int], dict[str, list[Figures]]] = defaultdict(dict)
    for name in names:
        for count in servers:
            for side, make in SIDES.items():
                runs = [measure(SETS[name], count, make, batches, seed) for seed in range(rounds)]
                numbers[name, count][side] = runs
    return [
        Comparison(
            benchmark="incast",
            workload=f"{name}, {count} server{'s' * (count > 1)}",
            rounds=runs,
            parameters={"servers": count, "batches": batches, "batch": BATCH},
        )
        for (name, count), runs in numbers.items()
    ]


def run_real(batches: int, rounds: int) -> Comparison:
    """Every side over the same line, in turns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_connection_file(folder / "keys", generate_keys(""))
        store = DatasetStore.create(str(folder / "datasets"))
        draft = Draft(store, "core/records", "v1")
        chance = np.random.default_rng(0)
        contents = ((chance.bytes(incast_line.RECORD_BYTES), {}) for _ in range(incast_line.RECORDS))
        draft.add("train", IterableImporter(contents, name="records"))
        draft.publish()
        stored = store.open("core/records:v1:train")
        line = stack.enter_context(incast_line.switched_line())
        stack.enter_context(incast_line.incast_servers(line, folder))
        DataClient(folder / "pool").preload(stored)
        seeds = itertools.count()
        sides = {
            side: lambda side=side: incast_line.measure_line(
                line, side, batches, next(seeds), folder, identity_of(stored)
            )
            for side in incast_line.windows()
        }
        return alternate("incast", "real TCP, files of 16 kB, 32 servers", sides, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.incast", description=__doc__)
    add_arguments(parser, rounds=3)
    parser.add_argument("--simulate", action="store_true", help="in simulated time")
    parser.add_argument("--batches", type=int, default=10, help="of one reader (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.batches <= RECORDS // BATCH:
        parser.error(f"--batches {arguments.batches}: 1 to {RECORDS // BATCH} are allowed")
    if not arguments.simulate:
        if reason := missing():
            parser.error(f"{reason}; --simulate takes nothing")
        batches, rounds = (3, 1) if arguments.quick else (arguments.batches, arguments.rounds)
        comparisons = [run_real(batches, rounds)]
    elif arguments.quick:
        comparisons = simulate(["files of 16 kB"], [1, 32], 3, 1)
    else:
        comparisons = simulate([*SETS], SERVERS, arguments.batches, arguments.rounds)
    publish(comparisons, METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
