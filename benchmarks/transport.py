"""How fast objects get to another process and back: our calls against Python gRPC and a raw socket.

    python -m benchmarks.transport [--json | --markdown] [--rounds N] [--quick]

The test of the thesis (5.4.1): a list of five bytes objects of 500 kB each goes to a server, which gets the
list and sends it back; the client compares what it got with what it sent. The same with arrays, which are
what a loader sends. And small calls. Over tcp on loopback and over ipc (a unix socket). Each side has a
server and a client process of its own; they take turns.

"memory kept" means processes in which glibc keeps freed memory, as our transport has it do: gRPC is measured
as it is and in such processes. The raw socket has them too: it is the floor.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from benchmarks.transport_sides import SIDES, Array, Client

OBJECTS, OBJECT_BYTES, SMALL_BYTES = 5, 500_000, 50
SHAPE = [OBJECT_BYTES] * OBJECTS
#: name -> (key in SIDES, whether its processes keep freed memory); the first is the baseline.
CONTESTANTS = {
    "grpc": ("grpc", False),
    "grpc, memory kept": ("grpc", True),
    "raw socket, memory kept": ("raw", True),
    "dpflow": ("dpflow", False),
}
ECHO_METRICS = [
    Metric(name="round_trip_ms", label="round trip ms", higher_is_better=False),
    Metric(name="gbit_s", label="Gbit/s"),
    Metric(name="cpu_ms", label="CPU ms", higher_is_better=False),
]
PING_METRICS = [
    Metric(name="calls_s", label="calls/s", spec=",.0f"),
    Metric(name="call_us", label="call us", higher_is_better=False),
    Metric(name="cpu_us", label="CPU us", higher_is_better=False),
]
processes = multiprocessing.get_context("spawn")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__.splitlines()[0])
    add_arguments(parser, rounds=7)
    arguments = parser.parse_args(argv)
    echoes, pings = (5, 20) if arguments.quick else (80, 1_000)
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="dpflow-") as directory:
        for scheme in ("tcp", "ipc"):
            comparisons += compare(scheme, directory, arguments.rounds, echoes, pings)
    publish(comparisons, [*ECHO_METRICS, *PING_METRICS], arguments)


def compare(scheme: str, directory: str, rounds: int, echoes: int, pings: int) -> list[Comparison]:
    """Both workloads over one transport."""
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(contestant(side, keeps, scheme, f"{directory}/{number}"))
            for number, (name, (side, keeps)) in enumerate(CONTESTANTS.items())
        }
        workloads = {
            f"{OBJECTS} x {OBJECT_BYTES // 1000} kB bytes, {scheme}": ("bytes", echoes),
            f"{OBJECTS} x {OBJECT_BYTES // 1000} kB arrays, {scheme}": ("arrays", echoes),
            f"{SMALL_BYTES} B, {scheme}": ("ping", pings),
        }
        return [
            alternate(
                "transport",
                workload,
                {name: functools.partial(run, kind, count) for name, run in clients.items()},
                rounds=rounds,
                parameters={"transport": scheme, "repetitions": count, "kind": kind},
            )
            for workload, (kind, count) in workloads.items()
        ]


@contextmanager
def contestant(side: str, keeps: bool, scheme: str, path: str) -> Iterator[Callable[[str, int], Figures]]:
    """A server and a client process; yields how to have the client do its work once."""
    address = f"ipc://{path}" if scheme == "ipc" else "tcp://127.0.0.1:0"
    ours, theirs = processes.Pipe()
    server = processes.Process(target=_serve, args=(side, keeps, address, theirs), daemon=True)
    server.start()
    address = ours.recv()
    client_end, client_theirs = processes.Pipe()
    client = processes.Process(target=_be_client, args=(side, keeps, address, server.pid, client_theirs), daemon=True)
    client.start()

    def run(kind: str, count: int) -> Figures:
        client_end.send((kind, count))
        figures: Figures = client_end.recv()
        return figures

    try:
        yield run
    finally:
        for process in (client, server):
            process.kill()
            process.join()


def _serve(side: str, keeps: bool, address: str, pipe: Connection) -> None:
    if keeps:
        _keep_freed_memory()
    SIDES[side].serve(address, pipe.send, SHAPE)


def _be_client(side: str, keeps: bool, address: str, server: int, pipe: Connection) -> None:
    if keeps:
        _keep_freed_memory()
    client = SIDES[side].connect(address, SHAPE)
    content = [os.urandom(size) for size in SHAPE]
    arrays = [np.frombuffer(bytearray(piece), np.uint8) for piece in content]
    works = {
        "bytes": functools.partial(_echo, client, content),
        "arrays": functools.partial(_echo_arrays, client, arrays),
        "ping": functools.partial(_ping, client),
    }
    while True:
        kind, count = pipe.recv()
        pipe.send(_measure(kind, works[kind], count, server))


def _echo(client: Client, objects: list[bytes]) -> None:
    _check(client.echo(objects) == objects)


def _echo_arrays(client: Client, arrays: list[Array]) -> None:
    received = client.echo_arrays(arrays)
    _check(len(received) == len(arrays) and all(map(np.array_equal, received, arrays)))


def _ping(client: Client) -> None:
    payload = b"x" * SMALL_BYTES
    _check(client.ping(payload) == payload)


def _check(equal: bool) -> None:
    if not equal:
        raise AssertionError("what came back is not what was sent")


def _measure(kind: str, work: Callable[[], None], count: int, server: int) -> Figures:
    for _ in range(max(5, count // 10)):
        work()
    times = []
    cpu = _cpu_s(server) + time.process_time()
    for _ in range(count):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    cpu_s = (_cpu_s(server) + time.process_time() - cpu) / count
    typical = statistics.median(times)
    if kind == "ping":
        return {"calls_s": 1 / typical, "call_us": typical * 1e6, "cpu_us": cpu_s * 1e6}
    bits = 8 * sum(SHAPE)
    return {"round_trip_ms": typical * 1e3, "gbit_s": bits / typical / 1e9, "cpu_ms": cpu_s * 1e3}


def _cpu_s(process: int) -> float:
    """CPU time of another process, user and system, seconds."""
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _keep_freed_memory() -> None:
    """What `torch_dpflow.ipc.transport` does where it is used."""
    bytes(31 << 20)


if __name__ == "__main__":
    main()
