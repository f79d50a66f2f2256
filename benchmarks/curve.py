"""What CURVE costs where results arrive: MB/s, and the processor time of a MB, from 1 to 64 senders over tcp.

    python -m benchmarks.curve [--json | --markdown] [--rounds N] [--quick]

One process receives, as a training process does; another one sends through as many sockets as there are workers, so on
a machine with few cores MB/s is what both ends reach together, and the processor time of each end is the figure to
build on. Frames are as large as an image of 224 x 224 x 3 bytes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import zmq

from benchmarks.meter import cpu_s
from benchmarks.report import Figures, Metric, add_arguments, alternate, publish

FRAME = 224 * 224 * 3
SENDERS = (1, 4, 16, 64)
#: Side -> whether bytes are encrypted, io threads of the receiver.
SIDES = {"plain": (False, 1), "curve, 1 io thread": (True, 1), "curve, 2 io threads": (True, 2)}
METRICS = [
    Metric(name="mb_s", label="MB/s", spec=",.0f"),
    Metric(name="receiver_us_per_mb", label="receiver, CPU us/MB", higher_is_better=False, spec=",.0f"),
    Metric(name="sender_us_per_mb", label="senders, CPU us/MB", higher_is_better=False, spec=",.0f"),
]
processes = multiprocessing.get_context("spawn")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curve", description=__doc__.splitlines()[0])
    add_arguments(parser, rounds=5)
    arguments = parser.parse_args(argv)
    frames = 64 if arguments.quick else 4_000
    publish(
        (
            alternate(
                "curve",
                f"{senders} sender{'s' * (senders > 1)}",
                {name: functools.partial(measure, frames, senders, *setting) for name, setting in SIDES.items()},
                rounds=1 if arguments.quick else arguments.rounds,
                parameters={"senders": senders, "frames": frames, "frame_bytes": FRAME},
            )
            for senders in SENDERS
        ),
        METRICS,
        arguments,
    )


def measure(frames: int, senders: int, encrypted: bool, io_threads: int) -> Figures:
    """Receive so many frames in a process of its own, after a tenth as many to warm up."""
    keys = zmq.curve_keypair() if encrypted else None
    warming = max(senders, frames // 10)
    with running(_receive, keys, io_threads, warming, frames) as (receiver, receiving):
        port = receiving.recv()
        with running(_send, keys and keys[0], port, senders) as (sender, _):
            receiving.recv()
            before = time.perf_counter(), cpu_s(receiver), cpu_s(sender)
            receiving.recv()
            after = time.perf_counter(), cpu_s(receiver), cpu_s(sender)
    wall, received, sent = (late - early for early, late in zip(before, after, strict=True))
    megabytes = frames * FRAME / 1e6
    return {
        "mb_s": megabytes / wall,
        "receiver_us_per_mb": received / megabytes * 1e6,
        "sender_us_per_mb": sent / megabytes * 1e6,
    }


@contextmanager
def running(target: object, *arguments: object) -> Iterator[tuple[int, Connection]]:
    """A process of its own, killed at the end: its pid, and the pipe on which it reports."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, ours
    finally:
        process.kill()
        process.join()


def _receive(pipe: Connection, keys: tuple[bytes, bytes] | None, io_threads: int, warming: int, frames: int) -> None:
    socket = zmq.Context(io_threads).socket(zmq.PULL)
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    for count in (warming, frames):
        for _ in range(count):
            socket.recv(copy=False)
        pipe.send(None)
    pipe.recv()


def _send(pipe: Connection, server_key: bytes | None, port: int, senders: int) -> None:
    context, payload = zmq.Context(2), os.urandom(FRAME)
    sockets = []
    for _ in range(senders):
        socket = context.socket(zmq.PUSH)
        socket.sndhwm = 4
        if server_key is not None:
            socket.curve_serverkey = server_key
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLOUT)
    while True:
        for socket, _ in poller.poll():
            socket.send(payload, copy=False)


if __name__ == "__main__":
    main()
