"""Options of the loader, checked once when they are made."""

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

#: Maximum of `LoaderOptions.prefetch_growth`; a larger factor would fill any memory.
MAX_GROWTH = 1000

Seeding = Literal["auto", "batch", "sample", "worker"]
#: The user's code that is sent to workers: see `LoaderOptions.code`.
Code: TypeAlias = Literal["auto"] | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of `DPFlowDataLoader` beyond torch's.

    With `flow=`, only `code` and `watch` are allowed: the loader raises OptionError for any other option.

    Args:
        read_threads: threads inside each worker that read the samples of one batch at the same time. More than one
            hides the latency of storage. Requires a thread-safe `__getitem__`; random draws in it then have no fixed
            order, so random augmentation is not repeatable. Not with seeding="sample".
        seeding: how torch, random and numpy are seeded in a worker.

            - "batch": before each batch, from (base seed, epoch, batch). Random augmentation is the same for any number
              of workers and after a crash, and an idle worker can take over a batch.
            - "sample": before each sample, from (base seed, epoch, batch, place in it); for `collate_fn` as "batch".
              As repeatable as "batch", but several workers can share a batch even if its samples draw random numbers.
              Datasets with `__getitems__` are seeded by batch.
            - "worker": torch's seeds and round-robin assignment. Batches equal torch's bit for bit, and no work
              is stolen. One difference: if persistent workers begin an epoch before the last one has ended, random
              numbers continue after the last delivered batch; with torch, after the last prefetched one.
            - "auto": "worker" for iterable datasets, datasets with a state and `worker_init_fn`; else "batch".

        prefetch_growth: factor, from 1 to 1000, by which the number of batches in flight may exceed torch's
            `prefetch_factor * num_workers` while a worker is idle because an older batch is late. Only with `in_order`,
            and with samplers that draw their order at the start of the epoch, which drawing ahead cannot change.
            None: 8 while the additional batches have less than 64 MiB, then 2. Additional batches of 64 MiB or more
            must take less than a quarter of the available memory. The number shrinks again when larger batches arrive.
        restart_limit: how many times in a row workers are replaced without a batch in between, before the loader
            raises WorkerStartError. None: 8; before the first batch, the number of workers plus two if that is less.
        poison_limit: `next()` raises PoisonTaskError for a batch once this many workers have ended while loading it.
        task_timeout_s: how long a worker may take for one batch, for its part of a batch, or for its start, seconds;
            None: no limit, as with torch. A worker that takes longer is killed and replaced, which counts for
            `poison_limit`. Give more than one worker alone takes for a batch, even if workers divide slow batches: if
            the worker that began one ends, another loads it alone. torch's `timeout` instead limits how long the
            training loop waits for a batch.
        shared_memory: bytes of shared memory that each worker may fill; 0 sends every batch through the socket;
            None allows a quarter of the machine's memory, divided among the workers.
        listen: with `platform=`, where to listen for workers: "tcp://HOST:PORT", port 0 for a free one. Workers must
            be able to reach it. None: the address in dpflow.toml; without one, the platform chooses an address.
        code: with `platform=` or `flow=`, which of your modules are sent to workers: "auto", the modules that the
            dataset needs; a list of files and folders: these in addition; None: none.
        min_workers: with `platform=`, how many workers must be connected before the first batch is loaded.
        watch: HOST:PORT, such as "127.0.0.1:8265", of a live page about the loaders of this process (extra `web`);
            None: the environment variable DPFLOW_WATCH, if set. LOCAL_RANK, as torchrun sets it, is added to the
            port. From other machines the page requires the token in the file that DPFLOW_WEB_TOKEN_FILE names.

    Raises:
        OptionError: a value, or a combination of values, is not allowed.
        OptionTypeError: a value is of the wrong type.
    """

    read_threads: int = 1
    seeding: Seeding = "auto"
    prefetch_growth: float | None = None
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
        check_fields(self, check_number, "prefetch_growth", minimum=1, maximum=MAX_GROWTH, optional=True)
        if self.seeding == "sample" and self.read_threads > 1:
            raise OptionError(
                f"seeding='sample' with read_threads={self.read_threads}: threads share the random generators, so "
                "samples cannot be seeded one by one; use read_threads=1 or seeding='batch'"
            )


def check_code(code: Code) -> None:
    """Raise OptionTypeError or OptionError if `code` is not allowed, or a path in it is no existing file or folder."""
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
