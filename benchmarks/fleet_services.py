"""Real services of a cluster for `benchmarks.fleet`, each in a process, and what clients say to them.

Run as a module, this file is one service: `python -m benchmarks.fleet_services ROLE FOLDER COUNT SIZE`.
"""

import hashlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import psutil

from benchmarks.cluster import cpu_s
from benchmarks.report import Figures
from examples.cluster import processes, started
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import JobId, RangeAssignment, RegisterShard, RouterSettings
from torch_dpflow.cluster.messages.shard import SAMPLE, Ask, Served, ShardSettings
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.cluster.services.provisioner import Provisioner
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.cluster.services.service import WorkerPlatform
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
from torch_dpflow.remote.launchers.contract import AdoptingPlatform, Fate, Finding, Ref, prefix_of
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import Limits

SAMPLES, BATCH, TOKEN, CLUSTER = 1_000_000, 256, "token", "f1ee7f1e"
#: Seconds without any call.
IDLE_S = 3.0


def spec_of(name: str = "fleet", size: int = SAMPLES) -> FlowSpec:
    content = hashlib.sha256(b"").hexdigest()
    return FlowSpec(name=name, version=1, size=size, content=content, fingerprint={}, policy="lru")


class ReadyLauncher:
    """A control plane whose workers are there at once, and do nothing."""

    limits = Limits(starts_per_s=1e6)

    def check(self) -> Sequence[Finding]:
        return []

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        return name

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        return {name: Fate() for name in workers}

    def stop(self, name: str, ref: Ref | None) -> None:
        pass

    def list(self, prefix: str) -> Mapping[str, Ref]:
        return {}

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ReadyPlatform:
    """The platform of `ReadyLauncher`."""

    name = "ready"
    sends_code = False

    def check_installed(self) -> None:
        pass

    def check_workers(self, workers: int) -> None:
        pass

    def check_listen(self, address: str) -> None:
        pass

    def listen_at(self) -> str:
        return "tcp://127.0.0.1:0"

    def launcher(self) -> ReadyLauncher:
        return ReadyLauncher()

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        return ThreadedPlatform(self.launcher())


def serve(role: str, folder: str, count: int, size: int) -> None:
    """Run a service until this process is killed, as `cluster.services.service.serve` does."""
    server: RpcServer
    poll: Callable[[], None]
    if role == "router":
        server = RpcServer(listen(f"ipc://{folder}/service"))
        shards = [f"shard-{number:04}" for number in range(count)]
        poll = Router(server, spec_of(size=size), RouterSettings(shards), token=TOKEN, incarnation=1).poll
    elif role == "provisioner":
        server, place = RpcServer(listen(f"ipc://{folder}/service")), WorkerPlatform(name="ready", max_workers=count)
        poll = Provisioner(server, ReadyPlatform(), place, prefix_of(CLUSTER), clock=time.monotonic).poll
    else:
        listener, settings = listen(f"ipc://{folder}/service"), ShardSettings(count, 1 << 28)
        shard = SampleShard(listener, spec_of(size=size), settings, token=TOKEN, end_worker=lambda *_: None)
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

    def __init__(self, role: str, count: int, stack: ExitStack, *, size: int = SAMPLES) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_dpflow-"))
        self._command = [sys.executable, "-m", "benchmarks.fleet_services", role, folder, str(count), str(size)]
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


def register(client: RpcClient, number: int) -> None:
    shard = RegisterShard(f"shard-{number:04}", 1, f"ipc:///{number}", TOKEN)
    client.call("register_shard", shard, reply_type=RangeAssignment)


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


def connected(address: str, count: int, stack: ExitStack) -> list[Worker]:
    """Connect so many workers to a shard, and wait until all are ready."""
    found: list[Worker] = []
    for number in range(count):
        found.append(Worker(address, number))
        stack.callback(found[-1].close)
    while not all(worker.is_ready for worker in found):
        for worker in found:
            worker.turn()
    return found


def load(client: RpcClient, found: Sequence[Worker], samples: range, *, ahead: int) -> None:
    """Have a job read these samples of a shard, `ahead` at a time, and the workers load them."""
    job, taken = JobId("job", 1, spec_of().instance, "job"), list[int]()
    for first in samples[::ahead]:
        tickets = list(range(first, min(samples.stop, first + ahead)))
        while tickets:
            ask = Ask(job, 0, 0, 1, tickets, tickets, taken)
            pending = client.begin("fetch", ask, reply_type=Served)
            while not pending.wait(0.001):
                for worker in found:
                    worker.turn()
            taken = [ticket for group in pending.result().body.samples for ticket in group.numbers]
            left = {*tickets}.difference(taken)
            tickets = [ticket for ticket in tickets if ticket in left]


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


if __name__ == "__main__":
    role, folder, count, size = sys.argv[1:]
    serve(role, folder, int(count), int(size))
