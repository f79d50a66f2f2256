"""tf.data service with its cross-trainer cache as a side of `benchmarks.sharing`.

Run as a program, `python -m benchmarks.sharing_tfdata`, it is the service, dispatcher and worker, and says its address.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from benchmarks.peers_sides import tf_crop

#: Of the jobs together: the worker has each batch once for all of them.
JOB_NAME = "sharing"


def is_installed() -> bool:
    """Whether this side can run."""
    return importlib.util.find_spec("tensorflow") is not None


class Service:
    """The process that loads, as the benchmark sees it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def elsewhere_s(self) -> float:
        return 0.0

    def loads(self) -> float:
        """It does not say what it has loaded."""
        return float("nan")


@contextmanager
def serving() -> Iterator[Service]:
    """Have a process load for jobs that are about to start."""
    command = [sys.executable, "-m", "benchmarks.sharing_tfdata"]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield Service(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


class Consumed:
    """The epochs that one job gets: parts of a stream without end, as the cache demands."""

    def __init__(
        self, address: str, files: list[str], samples: int, batch: int, number: int, like_torchvision: bool
    ) -> None:
        import tensorflow as tf

        service: Any = tf.data.experimental.service
        stream: Any = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
        stream = stream.map(tf_crop(tf, like_torchvision=like_torchvision), num_parallel_calls=tf.data.AUTOTUNE).batch(
            batch
        )
        stream = stream.apply(
            service.distribute(
                processing_mode=service.ShardingPolicy.OFF,
                service=address,
                job_name=JOB_NAME,
                # On this host compressing takes longer than sending.
                compression=None,
                cross_trainer_cache=service.CrossTrainerCache(trainer_id=f"job {number}"),
            )
        )
        self._batches: Iterator[Any] = stream.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()
        self._length = -(-samples // batch)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._length)


def main() -> None:
    import tensorflow as tf

    service: Any = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    print(dispatcher.target, flush=True)
    worker.join()


if __name__ == "__main__":
    main()
