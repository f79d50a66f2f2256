"""What a flow's services cost with many clients: the real services, driven by clients that load nothing.

    python -m benchmarks.fleet [--json] [--part jobs,nodes] [--counts 1,10,100,1000] [--quick]

Each service runs in a separate process. The clients run in this one, and speak the protocol of jobs, shards, workers
and training processes. What the parts measure is described in benchmarks/README.md.
"""

import argparse
import hashlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.cluster import cpu_s
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from examples.cluster import processes, started
from torch_dpflow.cluster.messages.coordinator import Cost, CostRequest, FlowSpec
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
    RangeAssignment,
    RegisterShard,
    RouterSettings,
    StartEpoch,
)
from torch_dpflow.cluster.messages.shard import SAMPLE, Ask, Served, ShardSettings
from torch_dpflow.cluster.security.connection_file import find_cluster, read_connection_file
from torch_dpflow.cluster.services.joining_node import Joining
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import RemoteCallError
from torch_dpflow.ipc.messages.headers import (
    Exchange,
    Finished,
    Window,
    WorkerHandshake,
    WorkerReady,
    WorkerWelcome,
    decode,
    encode,
)
from torch_dpflow.ipc.messages.payload_groups import group_payloads
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient, RpcServer
from torch_dpflow.ipc.serialization.fast_path import encode_sample
from torch_dpflow.ipc.transport import Connection, connect, listen

COUNTS = (1, 10, 100, 1000)
#: Flows that a cluster with joined nodes knows.
FLOWS = 50
SAMPLES, BATCH, TOKEN = 1_000_000, 256, "token"
#: Calls that are made in all, whatever the number of clients; samples that workers load; seconds without any call.
CALLS, LOADS, IDLE_S = 2000, 20_000, 3.0

_LOWER = partial(Metric, higher_is_better=False)
METRICS = (
    _LOWER(name="call_us", label="a call, µs", spec=".0f"),
    _LOWER(name="heartbeat_us", label="a heartbeat, µs", spec=".0f"),
    _LOWER(name="sample_us", label="a sample, µs", spec=".0f"),
    _LOWER(name="idle_ms_per_s", label="without calls, ms/s", spec=".1f"),
    _LOWER(name="join_ms", label="a client joins, ms", spec=".1f"),
    _LOWER(name="whole_s", label="whole again, s", spec=".2f"),
    _LOWER(name="memory_mib", label="memory, MiB", spec=".0f"),
)


def spec_of(name: str = "fleet") -> FlowSpec:
    content = hashlib.sha256(b"").hexdigest()
    return FlowSpec(name=name, version=1, size=SAMPLES, content=content, fingerprint={}, policy="lru")


# -- services in separate processes ----------------------------------------------------------------------------


def serve(role: str, folder: str, count: int) -> None:
    """Run a router or a shard until this process is killed, as `cluster.services.service.serve` does."""
    server: RpcServer
    poll: Callable[[], None]
    if role == "router":
        server = RpcServer(listen(f"ipc://{folder}/service"))
        shards = [f"shard-{number:04}" for number in range(count)]
        poll = Router(server, spec_of(), RouterSettings(shards), token=TOKEN, incarnation=1).poll
    else:
        listener, settings = listen(f"ipc://{folder}/service"), ShardSettings(count, 1 << 28)
        shard = SampleShard(listener, spec_of(), settings, token=TOKEN, end_worker=lambda *_: None)
        server, poll = shard.server, shard.poll
    print("", flush=True)
    poll_at = 0.0
    while True:
        server.step(0.1)
        if (now := time.monotonic()) >= poll_at:
            poll_at = now + 0.1
            poll()


class Service:
    """A service in a process, what it has used, and connections to it."""

    def __init__(self, role: str, count: int, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_dpflow-"))
        self._command = [sys.executable, "-m", "benchmarks.fleet", "--serve", role, folder, str(count)]
        self._stack, self.address = stack, f"ipc://{folder}/service"
        self.start()

    def start(self) -> None:
        """Start the process and wait until it serves."""
        self._process = self._stack.enter_context(subprocess.Popen(self._command, stdout=subprocess.PIPE))
        self._stack.callback(self._process.kill)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("a service of the benchmark has ended: see above")
        self.pid = self._process.pid

    def restart(self) -> None:
        """Kill the process, and start another at its address."""
        self._process.kill()
        self._process.wait()
        self.start()

    def client(self) -> RpcClient:
        options = ClientOptions(timeout_s=60.0, shared_bytes=0)
        return self._stack.enter_context(RpcClient(self.address, options=options))


def spent_us(pid: int, calls: int, run: Callable[[], object]) -> float:
    """Return the processor time that a process spends for each of the calls that `run` makes."""
    before = cpu_s(pid)
    run()
    return (cpu_s(pid) - before) / calls * 1e6


def at_rest(pid: int) -> Figures:
    """Return what a process uses without calls, and its memory."""
    before = cpu_s(pid)
    time.sleep(IDLE_S)
    idle = (cpu_s(pid) - before) / IDLE_S * 1e3
    return {"idle_ms_per_s": idle, "memory_mib": psutil.Process(pid).memory_full_info().uss / 2**20}


# -- parts -----------------------------------------------------------------------------------------------------


def register(client: RpcClient, number: int) -> None:
    shard = RegisterShard(f"shard-{number:04}", 1, f"ipc:///{number}", TOKEN)
    client.call("register_shard", shard, reply_type=RangeAssignment)


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


class Worker:
    """A worker that answers each task at once with the same small sample."""

    table, frames = encode_sample(np.arange(8))

    def __init__(self, address: str, number: int) -> None:
        self._connection: Connection = connect(address, identity=f"{number}/1/{TOKEN}".encode())
        self._connection.send([encode(WorkerHandshake(number, 1, 0, None))])
        self.is_ready = False
        self.loaded = 0

    def turn(self) -> None:
        """Handle a message, if there is one."""
        frames = self._connection.receive(0)
        if frames is None:
            return
        match decode(frames[0]):
            case WorkerWelcome():
                self._connection.send([encode(WorkerReady())])
                self.is_ready = True
            case Window(tasks=tasks) if tasks:
                self.loaded += len(tasks)
                results = [(task, SAMPLE, self.table, self.frames) for task in tasks]
                groups, parts = group_payloads(results, Finished)
                self._connection.send([encode(Exchange(groups, None)), *parts])

    def close(self) -> None:
        self._connection.close()


def workers(count: int, loads: int) -> Figures:
    """A shard with so many workers, and one job that reads."""
    with ExitStack() as stack:
        service = Service("shard", count, stack)
        client, flow = service.client(), spec_of().instance
        job = JobId("job", 1, flow, "job")
        found: list[Worker] = []

        def turn() -> None:
            for worker in found:
                worker.turn()

        def join() -> None:
            for number in range(count):
                found.append(Worker(service.address, number))
                stack.callback(found[-1].close)
            while not all(worker.is_ready for worker in found):
                turn()

        def read() -> None:
            taken: list[int] = []
            ahead = max(BATCH, 4 * count)
            for first in range(0, loads, ahead):
                tickets = list(range(first, min(loads, first + ahead)))
                while tickets:
                    ask = Ask(job, 0, 0, 1, tickets, tickets, taken)
                    pending = client.begin("fetch", ask, reply_type=Served)
                    while not pending.wait(0.001):
                        turn()
                    taken = [ticket for group in pending.result().body.samples for ticket in group.numbers]
                    left = {*tickets}.difference(taken)
                    tickets = [ticket for ticket in tickets if ticket in left]

        figures = {"join_ms": spent_us(service.pid, count, join) / 1e3}
        figures["sample_us"] = spent_us(service.pid, loads, read)
        return {**figures, **at_rest(service.pid)}


@contextmanager
def coordinator(*, listens: bool = False) -> Iterator[tuple[RpcClient, int, str]]:
    """The coordinator of a cluster, its process, and the cluster's connection file. listens: to other hosts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"tcp://127.0.0.1:{free.getsockname()[1]}" if listens else ""
    with started(listen=listen) as address, find_cluster(address).connect(timeout_s=60.0) as client:
        found: list[int] = []
        while not found:
            with suppress(RemoteCallError):  # it is starting
                found = [view.pid for view in processes(address) if view.role == "coordinator" and view.pid]
        yield client, found[0], address


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


def recovery(count: int, calls: int) -> Figures:
    """A router with so many jobs is killed in mid-epoch; whole again once each has drawn from the next one.

    At most 100 jobs: each takes a router 9 bytes for each of a million samples once it has resumed.
    """
    count = min(count, 100)
    with ExitStack() as stack:
        service = Service("router", 1, stack)
        flow, places = spec_of().instance, np.zeros(SAMPLES, np.bool_)
        places[:BATCH] = True
        marks = np.packbits(places).tobytes()

        def draw(position: int) -> None:
            client = service.client()
            register(client, 0)
            for number in range(count):
                name = f"job-{number}"
                body = Join(name, flow, number + 1, 0, BATCH, None, False)
                id = JobId(name, client.call("join", body, reply_type=Joined).body.generation, flow, "")
                place = EpochPlace(0, position, False)
                client.call("start", StartEpoch(id, [place], not position), [marks if position else b""])
                client.call("draw", DrawSamples(id, 0, position, BATCH))

        draw(0)
        killed = time.perf_counter()
        service.restart()
        draw(BATCH)
        return {"whole_s": time.perf_counter() - killed, **at_rest(service.pid)}


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
    "recovery": (recovery, 1),
    "combined": (combined, CALLS),
}


def measure(part: str, arguments: argparse.Namespace) -> Comparison:
    """One part with each number of clients, in turn."""
    run, calls = PARTS[part]
    rounds, calls = (1, calls // 20) if arguments.quick else (arguments.rounds, calls)
    sides = {f"{count:,} {part}": partial(run, count, calls) for count in arguments.counts}
    return alternate("fleet", part, sides, rounds=rounds, parameters={"calls": calls})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS), help="default: all")
    numbers: Any = lambda text: [int(float(part)) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--counts", type=numbers, default=list(COUNTS), help="of clients (default: 1 to 1,000)")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    add_arguments(parser, rounds=3)
    arguments = parser.parse_args()
    if arguments.serve:
        role, folder, count = arguments.serve
        serve(role, str(Path(folder)), int(count))
    if unknown := [part for part in arguments.part if part not in PARTS]:
        parser.error(f"--part={','.join(unknown)}: {', '.join(PARTS)} are allowed")
    publish([measure(part, arguments) for part in arguments.part], METRICS, arguments)


if __name__ == "__main__":
    main()
