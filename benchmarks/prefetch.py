"""Reading ahead of a known order in simulated time: the patent's way, ours, and none.

    python -m benchmarks.prefetch [--json | --markdown] [--rounds N] [--k 8 --nodes 8] [--quick]

The patent on prefetch caches states no figure. What it must come to, with N nodes, k samples a request, L = N(k-1)/2
samples held in the mean and a threshold T: hit rate (k-1)/k, 1/k requests a sample, and (k-1)/k L'/(T-L) samples moved
a sample read, where L' = (N-1)(k-1)/2 is what is held when a request has to be made: of its node nothing is. "later
hits" leaves out the first k reads; held and room are in samples, requests and moves for each sample. One reader
reads a shuffled epoch; a node answers one request after the other. No figure depends on the machine; a round is another
shuffle.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.node_lists import NodeLists, by_modulo
from benchmarks.report import Comparison, Figures, Metric, add_arguments, publish
from benchmarks.sliding_space import SlidingSpace
from torch_dpflow.cluster.cache.objects import Arrival, Load, Serve
from torch_dpflow.pool.planning.block_allocator import BlockAllocator
from torch_dpflow.pool.planning.read_ahead import ReadAhead, ReadAheadInstruction, StorageRequest

SAMPLE_BYTES = 110_000
#: Seconds that the reader computes for each sample, that a request takes to a node and back, that a sample takes there.
STEP_S, LATENCY_S, SAMPLE_S = 1e-3, 10e-3, 0.5e-3
READER = "reader"
METRICS = [
    Metric(name="epoch_s", label="epoch, s", higher_is_better=False, spec=".1f"),
    Metric(name="stall", label="stall", higher_is_better=False, spec=".3f"),
    Metric(name="hit_rate", label="hit rate", spec=".4f"),
    Metric(name="later_hit_rate", label="later hits", spec=".4f"),
    Metric(name="requests", label="requests", higher_is_better=False, spec=".3f"),
    Metric(name="mean_held", label="held", higher_is_better=False, spec=",.0f"),
    Metric(name="peak_held", label="at most", higher_is_better=False, spec=",.0f"),
    Metric(name="peak_room", label="room", higher_is_better=False, spec=",.0f"),
    Metric(name="moves", label="moves", higher_is_better=False, spec=".3f"),
]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one side reads."""

    samples: int
    nodes: int
    k: int
    #: Reads by which a request comes before its first sample is needed.
    lead: int
    space: Callable[[], BlockAllocator | SlidingSpace]
    #: Samples that may be held or on their way.
    room: int = 1 << 20


class Epoch:
    """One reader's epoch, in simulated time."""

    def __init__(self, reading: Reading, seed: int) -> None:
        self._reading = reading
        self._machine = ReadAhead(
            capacity_bytes=reading.room * SAMPLE_BYTES,
            k=reading.k,
            lead=reading.lead,
            order_of=partial(NodeLists, node_of=by_modulo(reading.nodes)),
        )
        self._order = np.random.default_rng(seed).permutation(reading.samples)
        self._space = reading.space()
        #: The samples in it.
        self._stored: set[int] = set()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._free_at = [0.0] * reading.nodes
        self._position = 0
        self._asked_at = self._waited = 0.0
        self._requests = self._hits_before = 0
        self._held: list[int] = []
        self._peak_room = 0

    def run(self) -> Figures:
        """Read everything; the figures, in seconds and samples."""
        self._do(self._machine.announce(READER, self._order))
        self._ask()
        while self._agenda:
            self._now, _, action = heapq.heappop(self._agenda)
            action()
        samples, first = self._reading.samples, self._reading.k
        return {
            "epoch_s": self._now,
            "stall": self._waited / self._now,
            "hit_rate": self._machine.hits / samples,
            "later_hit_rate": (self._machine.hits - self._hits_before) / (samples - first),
            "requests": self._requests / samples,
            "mean_held": statistics.fmean(self._held),
            "peak_held": max(self._held),
            "peak_room": self._peak_room / SAMPLE_BYTES,
            "moves": self._space.moved / samples if isinstance(self._space, SlidingSpace) else 0.0,
        }

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._now + seconds, next(self._numbers), action))

    def _do(self, instructions: Sequence[ReadAheadInstruction]) -> None:
        for one in instructions:
            if isinstance(one, StorageRequest):
                by_node: dict[int, list[Load]] = {}
                for load in one.loads:
                    by_node.setdefault(load.key % self._reading.nodes, []).append(load)
                for node, loads in by_node.items():
                    self._request(node, loads)
            elif isinstance(one, Serve):
                self._serve(int(self._order[one.samples[0][0]]))

    def _request(self, node: int, loads: list[Load]) -> None:
        self._requests += 1
        begins = max(self._now, self._free_at[node])
        self._free_at[node] = begins + SAMPLE_S * len(loads)
        self._after(self._free_at[node] + LATENCY_S - self._now, lambda: self._arrive(loads))

    def _arrive(self, loads: list[Load]) -> None:
        due = int(self._order[self._position])
        # The sample that is due goes to the reader and not into the space. One that had to go for it, as there was no
        # room, comes once more.
        kept = [one.key for one in loads if one.key != due and one.key not in self._stored]
        if not self._space.store([(key, SAMPLE_BYTES) for key in kept]):
            raise RuntimeError(f"{self._space.used} bytes are in use: the space is too small for this reading")
        self._stored.update(kept)
        self._peak_room = max(self._peak_room, self._space.used)
        self._do(self._machine.arrived([Arrival(load.load, load.key, SAMPLE_BYTES) for load in loads]))

    def _ask(self) -> None:
        self._asked_at = self._now
        if self._position == self._reading.k:
            self._hits_before = self._machine.hits
        self._held.append(len(self._stored))
        self._do(self._machine.read(READER, self._position))

    def _serve(self, key: int) -> None:
        self._waited += self._now - self._asked_at
        if key in self._stored:
            self._stored.remove(key)
            self._space.spend(key)
        self._after(STEP_S, self._next)

    def _next(self) -> None:
        position = self._position
        self._position += 1
        self._do(self._machine.consumed(READER, [position]))
        if self._position < self._reading.samples:
            self._ask()


def request_reads(k: int) -> int:
    """Reads while a request takes that waits for another one at its node (Little's law)."""
    return math.ceil((LATENCY_S + 2 * k * SAMPLE_S) / STEP_S)


def sides(samples: int, nodes: int, k: int) -> dict[str, Reading]:
    """The ways of reading; the room of ours is what the patent's way holds at most, or its lead and half of that."""
    mean = max(1, nodes * (k - 1) // 2)
    lead = request_reads(k)
    # What the patent's way holds at most in one shuffle: it has no bound of its own.
    capacity = 8 * (mean + lead) * SAMPLE_BYTES

    def line(times: int) -> Callable[[], SlidingSpace]:
        return lambda: SlidingSpace(capacity, times * mean * SAMPLE_BYTES)

    def blocks() -> BlockAllocator:
        return BlockAllocator(capacity)

    patent = Reading(samples=samples, nodes=nodes, k=k, lead=0, space=line(2))
    room = max(int(Epoch(patent, seed=0).run()["peak_held"]), 3 * lead // 2)
    ours = replace(patent, lead=lead, room=room, space=blocks)
    return {
        "none": replace(patent, k=1),
        "patent, T = 2L": patent,
        "patent, T = 4L": replace(patent, space=line(4)),
        "patent, blocks": replace(patent, space=blocks),
        "ours, the same room": ours,
        "ours, the room and its lead": replace(ours, room=room + lead),
    }


def derived(nodes: int, k: int, threshold: int) -> Figures:
    """What the patent's way must come to, with a threshold of so many times what is held."""
    return {
        "hit_rate": (k - 1) / k,
        "requests": 1 / k,
        "mean_held": nodes * (k - 1) / 2,
        "moves": (k - 1) / k * (nodes - 1) / nodes / (threshold - 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--k", type=int, default=8, help="samples a request (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=8, help="storage nodes (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=20_000, help="of an epoch (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.k < 2 or arguments.nodes < 1:
        parser.error(f"--k {arguments.k} --nodes {arguments.nodes}: at least 2 samples and 1 node are needed")
    samples = 2_000 if arguments.quick else arguments.samples
    if samples <= 2 * arguments.k * arguments.nodes:
        parser.error(f"{samples} samples: more than {2 * arguments.k * arguments.nodes} are needed")
    rounds = range(1 if arguments.quick else arguments.rounds)
    readings = sides(samples, arguments.nodes, arguments.k)
    publish(
        [
            Comparison(
                benchmark="prefetch",
                workload=f"{arguments.nodes} x {arguments.k}",
                rounds={name: [Epoch(one, seed).run() for seed in rounds] for name, one in readings.items()},
                parameters={
                    "samples": samples,
                    "step_s": STEP_S,
                    "latency_s": LATENCY_S,
                    "sample_s": SAMPLE_S,
                    "derived, T = 2L": derived(arguments.nodes, arguments.k, 2),
                    "derived, T = 4L": derived(arguments.nodes, arguments.k, 4),
                },
            )
        ],
        METRICS,
        arguments,
    )
    if not arguments.json:
        for times in (2, 4):
            figures = derived(arguments.nodes, arguments.k, times).items()
            print(f"derived, T = {times}L: " + ", ".join(f"{name} {value:.4g}" for name, value in figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
