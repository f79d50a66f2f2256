"""What else of the same user finds the loader's socket and says something there: it does no harm."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from typing import Any

import zmq

from tests.loader_cases import Indices
from torch_dpflow.remote.messages import Exchange, Stop, WorkerHello, WorkerReady, encode

SIZE = 400


def said_by_strangers() -> list[tuple[bytes, list[bytes]]]:
    """Identities and frames: noise, wrong places, and workers that nobody has started."""
    noise = random.Random(0).randbytes(50)
    bodies = [
        [b""],
        [noise],
        [encode(Stop())],
        [encode(WorkerReady())],
        [encode(Exchange([], None))],
        [encode(Exchange([], 7)), noise],
    ]
    said = [(identity, body) for identity in (b"stranger", b"99/0", b"-1/0") for body in bodies]
    for worker in (99, -1, 1 << 62, 0):
        hello = [encode(WorkerHello(worker, 5, os.getpid(), None))]
        said += [(b"stranger", hello), (b"%d/5" % worker, hello)]
    return said


def say(path: str, identity: bytes, frames: Sequence[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.setsockopt(zmq.LINGER, 5000)
        dealer.connect(f"ipc://{path}")
        dealer.send_multipart(frames)


def test_strangers_at_the_socket_are_not_heard(OurLoader: Any) -> None:
    loader = OurLoader(Indices(SIZE), batch_size=2, num_workers=2)
    iterator = iter(loader)
    seen = next(iterator).tolist()
    path = os.path.join(iterator._shard._directory.path, "shard")
    for identity, frames in said_by_strangers():
        say(path, identity, frames)
        seen += next(iterator).tolist()
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.send(b"not ZeroMQ at all\r\n")
        seen += next(iterator).tolist()
    seen += [int(index) for batch in iterator for index in batch]
    assert seen == list(range(SIZE))
    assert loader.stats().restarts == 0
