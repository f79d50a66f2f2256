"""What a flow's services cost with many clients: the real services, driven by clients that load nothing.

    python -m benchmarks.fleet [--json] [--part jobs,nodes] [--counts 1,10,100,1000] [--quick]

Each service runs in a separate process. The clients run in this one, and speak the protocol of jobs, shards, workers
and training processes. What the parts measure is described in benchmarks/README.md.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks import fleet_recovery
from benchmarks.fleet_services import (
    BATCH,
    SAMPLES,
    Service,
    Worker,
    at_rest,
    connected,
    coordinator,
    load,
    register,
    spec_of,
    spent_us,
)
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from torch_dpflow.cluster.messages.coordinator import Cost, CostRequest
from torch_dpflow.cluster.messages.node import MAX_NODES, NodeAssignment, NodeJoined, NodeReport
from torch_dpflow.cluster.messages.router import (
    MAX_JOBS,
    DrawSamples,
    EpochPlace,
    JobHeartbeat,
    JobHeartbeatReply,
    JobId,
    Join,
    Joined,
    StartEpoch,
)
from torch_dpflow.cluster.security.connection_file import find_cluster, read_connection_file
from torch_dpflow.cluster.services.joining_node import Joining

COUNTS = (1, 10, 100, 1000)
#: Flows that a cluster with joined nodes knows.
FLOWS = 50
#: Calls that are made in all, whatever the number of clients; samples that workers load.
CALLS, LOADS = 2000, 20_000

_LOWER = partial(Metric, higher_is_better=False)
METRICS = (
    _LOWER(name="call_us", label="a call, µs", spec=".0f"),
    _LOWER(name="heartbeat_us", label="a heartbeat, µs", spec=".0f"),
    _LOWER(name="sample_us", label="a sample, µs", spec=".0f"),
    _LOWER(name="idle_ms_per_s", label="without calls, ms/s", spec=".1f"),
    _LOWER(name="node_ms_per_s", label="node, ms/s", spec=".1f"),
    _LOWER(name="join_ms", label="a client joins, ms", spec=".1f"),
    _LOWER(name="first_s", label="first batch, s", spec=".2f"),
    _LOWER(name="whole_s", label="whole again, s", spec=".2f"),
    _LOWER(name="memory_mib", label="memory, MiB", spec=".0f"),
)

# -- parts -----------------------------------------------------------------------------------------------------


def jobs(count: int, calls: int) -> Figures:
    """A router with so many jobs: a call draws the samples of one batch."""
    count = min(count, MAX_JOBS)
    with ExitStack() as stack:
        service = Service("router", 1, stack)
        client = service.client()
        register(client, 0)
        flow, marks = spec_of().instance, np.zeros(-(-SAMPLES // 8), np.uint8).tobytes()
        ids: list[JobId] = []

        def join() -> None:
            for number in range(count):
                name = f"job-{number}"
                body = Join(name, flow, number + 1, 0, BATCH, None, False)
                joined = client.call("join", body, reply_type=Joined).body
                ids.append(JobId(name, joined.generation, flow, ""))
                client.call("start", StartEpoch(ids[-1], [EpochPlace(0, 0, False)], True), [marks])

        def draw() -> None:
            for turn in range(calls):
                client.call("draw", DrawSamples(ids[turn % count], 0, turn // count * BATCH, BATCH))

        def beat() -> None:
            for turn in range(calls):
                client.call("heartbeat", JobHeartbeat(ids[turn % count]), reply_type=JobHeartbeatReply)

        joined_us = spent_us(service.pid, count, join)
        figures = {"join_ms": joined_us / 1e3, "call_us": spent_us(service.pid, calls, draw)}
        return {**figures, "heartbeat_us": spent_us(service.pid, calls, beat), **at_rest(service.pid)}


def shards(count: int, calls: int) -> Figures:
    """A router with so many shards, each of which registers once a second."""
    with ExitStack() as stack:
        service = Service("router", count, stack)
        client = service.client()

        def join() -> None:
            for number in range(count):
                register(client, number)

        def beat() -> None:
            for turn in range(max(calls, count)):
                register(client, turn % count)

        figures = {"join_ms": spent_us(service.pid, count, join) / 1e3}
        figures["heartbeat_us"] = spent_us(service.pid, max(calls, count), beat)
        return {**figures, **at_rest(service.pid)}


def workers(count: int, loads: int) -> Figures:
    """A shard with so many workers, and one job that reads."""
    with ExitStack() as stack:
        service = Service("shard", count, stack)
        client, found = service.client(), list[Worker]()
        joined_us = spent_us(service.pid, count, lambda: found.extend(connected(service.address, count, stack)))
        read = partial(load, client, found, range(loads), ahead=max(BATCH, 4 * count))
        figures = {"join_ms": joined_us / 1e3, "sample_us": spent_us(service.pid, loads, read)}
        return {**figures, **at_rest(service.pid)}


def flows(count: int, calls: int) -> Figures:
    """A coordinator that knows so many flows, none of which runs; a call requests what one has cost."""
    with coordinator() as (client, pid, _):

        def join() -> None:
            for number in range(count):
                client.call("register", spec_of(f"fleet/{number}"), reply_type=bool)

        def request() -> None:
            for turn in range(calls):
                flow = spec_of(f"fleet/{turn % count}").instance
                client.call("cost", CostRequest(flow, "job"), reply_type=Cost)

        figures = {"join_ms": spent_us(pid, count, join) / 1e3, "call_us": spent_us(pid, calls, request)}
        return {**figures, **at_rest(pid)}


def nodes(count: int, calls: int) -> Figures:
    """A coordinator with so many joined nodes, at most 256, and fifty flows that do not run; a call is a report."""
    count = min(count, MAX_NODES)
    with coordinator(listens=True) as (client, pid, address):
        cluster, keys = find_cluster(address), read_connection_file(address)
        joined: list[tuple[str, NodeJoined]] = []
        for number in range(FLOWS):
            client.call("register", spec_of(f"fleet/{number}"), reply_type=bool)

        def join() -> None:
            for number in range(count):
                joining = Joining(cluster, keys, f"node-{number}", "127.0.0.1", 16)
                joined.append((joining.name, joining.join()))

        def report() -> None:
            for turn in range(calls):
                name, answer = joined[turn % count]
                here = NodeReport(name, answer.generation, answer.token, "here", [])
                client.call("report_node", here, reply_type=NodeAssignment)

        figures = {"join_ms": spent_us(pid, count, join) / 1e3, "call_us": spent_us(pid, calls, report)}
        return {**figures, **at_rest(pid)}


def combined(count: int, calls: int) -> Figures:
    """A shard with so many workers, a router with a fifth as many jobs, and a coordinator with a tenth as many nodes.

    All are driven at once. A call is a draw, and a heartbeat the report of a node.
    """
    with ThreadPoolExecutor() as pool:
        drawn = pool.submit(jobs, max(1, count // 5), calls)
        loaded = pool.submit(workers, count, LOADS)
        reported = pool.submit(nodes, max(1, count // 10), calls)
    found = (drawn.result(), loaded.result(), reported.result())
    return {
        "call_us": found[0]["call_us"],
        "sample_us": found[1]["sample_us"],
        "heartbeat_us": found[2]["call_us"],
        "memory_mib": sum(one["memory_mib"] for one in found),
    }


PARTS: dict[str, tuple[Callable[[int, int], Figures], int]] = {
    "jobs": (jobs, CALLS),
    "shards": (shards, CALLS),
    "workers": (workers, LOADS),
    "flows": (flows, CALLS),
    "nodes": (nodes, CALLS),
    "provisioner": (fleet_recovery.provisioner, CALLS),
    "running": (fleet_recovery.running, 1),
    "router": (fleet_recovery.router, 1),
    "shard": (fleet_recovery.shard, 1),
    "coordinator": (fleet_recovery.coordinator, 1),
    "combined": (combined, CALLS),
}


def measure(part: str, arguments: argparse.Namespace) -> Comparison:
    """One part with each number of clients, in turn."""
    run, calls = PARTS[part]
    rounds, calls = (1, -(-calls // 20)) if arguments.quick else (arguments.rounds, calls)
    sides = {f"{count:,} {part}": partial(run, count, calls) for count in arguments.counts}
    return alternate("fleet", part, sides, rounds=rounds, parameters={"calls": calls})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS), help="default: all")
    numbers: Any = lambda text: [int(float(part)) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--counts", type=numbers, default=list(COUNTS), help="of clients (default: 1 to 1,000)")
    add_arguments(parser, rounds=3)
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.part if part not in PARTS]:
        parser.error(f"--part={','.join(unknown)}: {', '.join(PARTS)} are allowed")
    publish([measure(part, arguments) for part in arguments.part], METRICS, arguments)


if __name__ == "__main__":
    main()
