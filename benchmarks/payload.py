"""How a batch crosses from a worker to the training process: our payloads against torch's queue.

    python -m benchmarks.payload [--json] [--rounds 5] [--quick]

One worker process collates a batch and sends it, at most two ahead, as in torch's loader; the training
process copies it into a buffer of its own, as a copy to a device would. torch's side is its multiprocessing
queue, for which its loader's workers collate in shared memory. Ours is `default_collate` into the arena,
`encode`, one message over ipc, and `decode`.

The last workload tells what encoding and decoding a pair of small tensors costs by itself, in one process and
without the transport, beside a plain pickle of the same.
"""

import argparse
import os
import pickle
import resource
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.multiprocessing as multiprocessing
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from benchmarks.report import Figures, Metric, add_arguments, alternate, publish
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import PayloadTable
from torch_dpflow.ipc.serialization.codec import decode, encode
from torch_dpflow.ipc.transport import connect, listen
from torch_dpflow.workers.batch_worker import collate_into

#: Batches asked for ahead of need, as torch's loader does for one worker.
PREFETCH = 2
WARM_UP = 10

METRICS = (
    Metric(name="batches_per_s", label="batches/s"),
    Metric(name="us_per_batch", label="us/batch", higher_is_better=False, spec=",.0f"),
    Metric(name="cpu_us_per_batch", label="CPU us/batch", higher_is_better=False, spec=",.0f"),
    Metric(name="consumer_cpu_us", label="CPU us/batch, training", higher_is_better=False, spec=",.0f"),
    Metric(name="worker_cpu_us", label="CPU us/batch, worker", higher_is_better=False, spec=",.0f"),
    Metric(name="encode_us", label="encode, us", higher_is_better=False, spec=",.1f"),
    Metric(name="decode_us", label="decode, us", higher_is_better=False, spec=",.1f"),
)


@dataclass(frozen=True)
class Workload:
    """What the worker collates, and how often."""

    samples: Callable[[], list[Any]]
    batches: int


def _images(count: int, *shape: int) -> list[Any]:
    return [(torch.rand(shape), index) for index in range(count)]


WORKLOADS = {
    "38 MB": Workload(partial(_images, 64, 3, 224, 224), 150),
    "1 MB": Workload(partial(_images, 64, 64, 64), 2000),
    "256 kB pair": Workload(partial(_images, 256, 256), 3000),
    "4 kB pair": Workload(partial(_images, 16, 64), 5000),
}
CODEC = "encode and decode alone"


class Consumer:
    """The training process: takes `batches` batches and copies each."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._buffers: dict[torch.Size, torch.Tensor] = {}

    def consume(self, batch: Any) -> None:
        for tensor in batch:
            buffer = self._buffers.setdefault(tensor.shape, torch.empty_like(tensor))
            buffer.copy_(tensor)

    def run(self, request: Callable[[], None], receive: Callable[[], Any]) -> tuple[float, float]:
        """Seconds and CPU seconds that the batches after the warm-up took."""
        for _ in range(PREFETCH):
            request()
        start = cpu = 0.0
        for number in range(WARM_UP + self.batches):
            if number == WARM_UP:
                start, cpu = time.perf_counter(), time.process_time()
            batch = receive()
            request()
            self.consume(batch)
            del batch
        return time.perf_counter() - start, time.process_time() - cpu


def _figures(workload: Workload, wall: float, consumer_cpu: float, worker_cpu: float) -> Figures:
    per_batch = 1e6 / workload.batches
    worker_cpu *= workload.batches / (workload.batches + WARM_UP)
    return {
        "batches_per_s": workload.batches / wall,
        "us_per_batch": wall * per_batch,
        "cpu_us_per_batch": (consumer_cpu + worker_cpu) * per_batch,
        "consumer_cpu_us": consumer_cpu * per_batch,
        "worker_cpu_us": worker_cpu * per_batch,
    }


@contextmanager
def _process(target: Callable[..., None], *args: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(target, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join()


def _worker(target: Callable[..., None], result: Any, samples: Callable[[], list[Any]], *args: Any) -> None:
    torch.set_num_threads(1)
    # torch's collate stacks into shared memory where it finds itself in a worker.
    torch_worker._worker_info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    batch = samples()
    begin = resource.getrusage(resource.RUSAGE_SELF)
    target(batch, *args)
    end = resource.getrusage(resource.RUSAGE_SELF)
    result.send(end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime)
    result.recv()  # what torch shares by descriptor is to be had from this process only


def _torch_work(samples: list[Any], requests: Any, results: Any) -> None:
    while requests.get():
        results.put(default_collate(samples))


def run_torch(workload: Workload) -> Figures:
    """torch.multiprocessing queues, as its loader uses them."""
    context = multiprocessing.get_context("fork")
    requests, results = context.Queue(), context.Queue()
    requests.cancel_join_thread()
    with _process(_torch_work, workload.samples, requests, results) as pipe:
        consumer = Consumer(workload.batches)
        wall, cpu = consumer.run(lambda: requests.put(True), results.get)
        for _ in range(PREFETCH):
            results.get()
        requests.put(False)
        worker_cpu = pipe.recv()
        pipe.send(None)
    return _figures(workload, wall, cpu, worker_cpu)


def _dpflow_work(samples: list[Any], address: str) -> None:
    arena = Arena(budget_bytes=1 << 30)
    collate_into(arena)
    connection = connect(address)
    connection.send([msgspec.msgpack.encode((os.getpid(), arena.probe_ref()))])
    while (request := connection.receive(None)) is not None and bytes(request[0]) == b"more":
        table, frames = encode(default_collate(samples), arena=arena)
        connection.send([msgspec.msgpack.encode(table), *frames])
    connection.close()


def run_dpflow(workload: Workload) -> Figures:
    """Payloads in an arena, over the loader's own transport."""
    tables = msgspec.msgpack.Decoder(PayloadTable)
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/socket"
        with _process(_dpflow_work, workload.samples, address) as pipe:
            listener = listen(address)
            peer, hello = listener.receive(None) or (b"", [])
            reader = ArenaReader(msgspec.msgpack.decode(hello[0])[0])

            def receive() -> Any:
                _, (table, *frames) = listener.receive(None) or (b"", [])
                return decode(tables.decode(table), frames, reader=reader)

            consumer = Consumer(workload.batches)
            wall, cpu = consumer.run(lambda: listener.send(peer, [b"more"]) and None, receive)
            for _ in range(PREFETCH):
                receive()
            listener.send(peer, [b"enough"])
            worker_cpu = pipe.recv()
            pipe.send(None)
            listener.close()
    return _figures(workload, wall, cpu, worker_cpu)


def _pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(64), torch.arange(64)


def _best_us(call: Callable[[], Any], times: int) -> float:
    return min(timeit.repeat(call, number=times, repeat=5)) / times * 1e6


def pickle_pair(times: int) -> Figures:
    """Plain pickle of a pair of small tensors."""
    pair = _pair()
    pickled = pickle.dumps(pair, protocol=5)
    return {
        "encode_us": _best_us(lambda: pickle.dumps(pair, protocol=5), times),
        "decode_us": _best_us(lambda: pickle.loads(pickled), times),
    }


def payload_pair(times: int) -> Figures:
    """The same pair as a payload."""
    pair = _pair()
    table, frames = encode(pair)
    return {
        "encode_us": _best_us(lambda: encode(pair), times),
        "decode_us": _best_us(lambda: decode(table, frames), times),
    }


def _sides(name: str, *, quick: bool) -> tuple[dict[str, Callable[[], Figures]], dict[str, object]]:
    if name == CODEC:
        times = 200 if quick else 5000
        sides = {"pickle": partial(pickle_pair, times), "dpflow": partial(payload_pair, times)}
        return sides, {"times": times}
    workload = WORKLOADS[name]
    if quick:
        workload = Workload(workload.samples, max(workload.batches // 20, 5))
    sides = {"torch": partial(run_torch, workload), "dpflow": partial(run_dpflow, workload)}
    return sides, {"batches": workload.batches, "prefetch": PREFETCH}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS, CODEC], help="only this one; repeatable")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comparisons = []
    for name in arguments.workload or [*WORKLOADS, CODEC]:
        sides, parameters = _sides(name, quick=arguments.quick)
        comparisons.append(alternate("payload", name, sides, rounds=arguments.rounds, parameters=parameters))
    publish(comparisons, METRICS, arguments)


if __name__ == "__main__":
    main()
