"""What else of the same user finds the loader's socket and says something there: it does no harm."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import zmq

from tests.contracts.platforms import wakes
from tests.loader_cases import Indices
from torch_dpflow.ipc.messages.headers import Exchange, Stop, WorkerHandshake, WorkerReady, encode
from torch_dpflow.workers.batch_worker import WorkerSpec, exit_report_path, main
from torch_dpflow.workers.local_platform import LocalPlatform
from torch_dpflow.workers.platform import ProcessSpec

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
        hello = [encode(WorkerHandshake(worker, 5, os.getpid(), None))]
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
    path = os.path.join(iterator._shard.processes.directory.path, "shard")
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


def test_a_worker_that_was_replaced_is_told_so_and_ends(OurLoader: Any) -> None:
    loader = OurLoader(Indices(SIZE), batch_size=2, num_workers=1)
    iterator = iter(loader)
    seen = next(iterator).tolist()
    shard = iterator._shard
    worker_spec = WorkerSpec(
        worker=0,
        incarnation=9,
        address=shard._listener.address,
        directory=shard.processes.directory.path,
    )
    platform = LocalPlatform(multiprocessing.get_context("fork"))
    report_file = exit_report_path(worker_spec)
    with closing(platform):
        spec = ProcessSpec(
            name="late",
            incarnation=9,
            target=main,
            arguments=(shard.processes._load_spec, worker_spec),
            report_file=report_file,
        )
        late = platform.launch(spec)
        assert wakes(platform, 60.0)
        assert list(platform.take_ended()) == [late]
        end = late.describe()
    assert end is not None
    assert end.code == 1
    assert "its present incarnation is 0" in end.report
    seen += [int(index) for batch in iterator for index in batch]
    assert seen == list(range(SIZE))
