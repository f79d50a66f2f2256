"""Option objects: frozen, keyword-only, checked once when they are made."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch_dpflow._core.checks import (
    check_fields,
    check_int,
    check_number,
    check_seconds,
    check_tcp_address,
    check_type,
)
from torch_dpflow.errors import OptionError, OptionTypeError

#: Growth of the batches in flight; more would fill any memory.
MAX_GROWTH = 1000

Seeding = Literal["auto", "batch", "sample", "worker"]
#: The user's code that is sent to workers. "auto": the modules that the pickle needs; paths: these too; None: none.
Code: TypeAlias = Literal["auto"] | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of `DPFlowDataLoader` beyond torch's. The defaults change no result.

    With `flow=`, only `code` and `watch` apply, and a loader that is given another option raises OptionError.

    Args:
        read_threads: threads inside each worker that read the samples of one batch at the same time. More than one
            hides the latency of storage. Requires a thread-safe `__getitem__`; random draws in it then have no fixed
            order, so random augmentation is not repeatable.
        seeding: how torch, random and numpy are seeded in a worker. "batch" seeds them before each batch from (base
            seed, epoch, batch): random augmentation is the same for any number of workers and after a crash, and an
            idle worker may take over a batch. "sample" seeds them before each sample from (base seed, epoch, batch,
            place in the batch), and as "batch" before `collate_fn`. This is equally repeatable, and several workers may
            load one batch even if its samples draw random numbers. Datasets with `__getitems__` are seeded by batch.
            "worker" uses torch's stream and round-robin assignment: batches equal torch's bit for bit, and no work is
            stolen. (If persistent workers begin another epoch before the end of one, their streams continue behind the
            last delivered batch; torch's continue behind the last prefetched one.) "auto" is "worker" with a
            `worker_init_fn`, an iterable dataset or one with a state, else "batch".
        prefetch_growth: how far the batches in flight may grow beyond torch's `prefetch_factor * num_workers` while a
            worker is idle because an older batch is late; a factor from 1 to 1000. Only for samplers that draw their
            order at the start of the epoch, because drawing further ahead cannot change it.
        restart_limit: how many times in a row workers are replaced without a batch in between, before the loader
            raises WorkerStartError. None: 8, and before the first batch at most the number of workers plus two.
        poison_limit: a batch raises PoisonTaskError once this many workers have ended while they loaded it.
        task_timeout_s: how long a worker may take for one batch, for its part of a batch, or for its start, seconds;
            None: no limit, as with torch. A worker that takes longer is killed and replaced, which counts for
            `poison_limit`. torch's `timeout` instead limits how long the training loop waits for a batch.
        shared_memory: bytes of shared memory that each worker may fill; 0 sends every batch through the socket;
            None allows a quarter of the machine's memory, divided among the workers.
        listen: with `platform=`, where to listen for workers: "tcp://HOST:PORT", port 0 for a free one. Workers must
            be able to reach it. None: an address of this host that the platform suggests.
        code: with `platform=` or `flow=`, which of your modules are sent to workers: "auto", the modules that the
            dataset needs; a list of files and folders: these in addition; None: none.
        min_workers: with `platform=`, how many workers must be connected before the first batch is loaded.
        watch: HOST:PORT, such as "127.0.0.1:8265", of a live page about the loaders of this process (extra `web`);
            None: the environment variable DPFLOW_WATCH, if set. LOCAL_RANK, as torchrun sets it, is added to the
            port. Beyond this machine the page requires the token in the file DPFLOW_WEB_TOKEN_FILE.

    Raises:
        OptionError: a value is out of range.
        OptionTypeError: a value is of the wrong type.
    """

    read_threads: int = 1
    seeding: Seeding = "auto"
    prefetch_growth: float = 2.0
    restart_limit: int | None = None
    poison_limit: int = 3
    task_timeout_s: float | None = None
    shared_memory: int | None = None
    listen: str | None = None
    code: Code = "auto"
    min_workers: int = 1
    watch: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_int, "read_threads", "poison_limit", minimum=1)
        check_fields(self, check_int, "restart_limit", minimum=0, optional=True)
        check_fields(self, check_seconds, "task_timeout_s", optional=True)
        check_fields(self, check_int, "shared_memory", minimum=0, optional=True)
        check_fields(self, check_int, "min_workers", minimum=1)
        if self.listen is not None:
            check_tcp_address("listen", self.listen)
        check_code(self.code)
        if self.watch is not None:
            check_type("watch", self.watch, str, "HOST:PORT, such as '127.0.0.1:8265', or None")
        if self.seeding not in get_args(Seeding):
            raise OptionError(f"seeding={self.seeding!r} is not one of {get_args(Seeding)}")
        check_fields(self, check_number, "prefetch_growth", minimum=1, maximum=MAX_GROWTH)
        if self.seeding == "sample" and self.read_threads > 1:
            raise OptionError(
                f"seeding='sample' with read_threads={self.read_threads}: threads share the random generators, so "
                "samples cannot be seeded one by one; use read_threads=1 or seeding='batch'"
            )


def check_code(code: Code) -> None:
    """Raise OptionTypeError or OptionError unless `code` is allowed, and its paths exist."""
    if code is None or code == "auto":
        return
    given = f"code={code!r:.200}"
    allowed = f"{given}: give 'auto', None, or a list of paths such as ['src/mylib']"
    if isinstance(code, str):
        raise OptionError(allowed)
    if not isinstance(code, Sequence):
        raise OptionTypeError(allowed)
    for path in code:
        if not isinstance(path, str | os.PathLike):
            raise OptionTypeError(f"{given}: {path!r} is not a path; give files and directories")
        if not os.path.exists(path):
            raise OptionError(f"{given}: there is no {os.fspath(path)!r} in {os.getcwd()}")
        if not os.path.isfile(path) and not os.path.isdir(path):
            raise OptionError(f"{given}: {os.fspath(path)!r} is a device, pipe or socket; give files and directories")
