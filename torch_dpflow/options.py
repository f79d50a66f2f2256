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

#: The most that the batches in flight may grow by; beyond it they would fill any memory.
MAX_GROWTH = 1000

Seeding = Literal["auto", "batch", "worker"]
#: Which code of the user's is sent to workers elsewhere. "auto": what the pickle needs; paths: these too; None: none.
Code: TypeAlias = Literal["auto"] | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What `DPFlowDataLoader` can do beyond torch's loader. The defaults change nothing that a user sees.

    Args:
        read_threads: threads inside each worker that read the samples of one batch at the same time. More than
            one hides the latency of storage. It needs a thread-safe `__getitem__`, and a `__getitem__` that
            draws random numbers draws them in no fixed order, so random augmentation is no longer
            repeatable: hence 1 by default.
        seeding: how torch, random and numpy are seeded in a worker. "batch" seeds them before each batch from
            (base seed, epoch, batch), so random augmentation is the same whatever the number of workers and
            after any crash. An idle worker may load a batch that another has begun, which is delivered once.
            "worker" gives each worker torch's own stream and torch's round-robin
            assignment: the batches equal those of torch's loader bit for bit, but no work is stolen; where
            persistent workers begin another epoch before the end of one, they have drawn for the delivered
            batches alone, and torch's for prefetched ones too. "auto" takes "worker" when a `worker_init_fn` is
            given, or the dataset is iterable or keeps a state, else "batch".
        prefetch_growth: how far the batches in flight may grow beyond torch's `prefetch_factor * num_workers`
            while a worker has nothing to do because an older batch is late; a factor from 1 to 1000. Only
            where the sampler draws its order at the start of the epoch, so that drawing further ahead
            cannot change it.
        restart_limit: how many times in a row workers are replaced, without one batch arriving in between,
            before the loader gives up. None: 8, and until the first batch of all has come no more than there are
            workers and two more, since workers that cannot begin will not begin the next time.
        poison_limit: after how many workers a batch that takes its worker down is given up.
        task_timeout_s: how long a worker may be at one batch, or at its own start, seconds; None: no limit, as
            with torch. One that takes longer is taken for hung, killed and replaced, and the batch counts as one that
            killed it. torch's `timeout` is something else: how long the training loop waits for its next batch.
        shared_memory: bytes of shared memory that each worker may fill; 0 sends every batch through the socket;
            None allows a quarter of the machine's memory, divided among the workers.
        listen: with `platform=`, where to listen for workers: "tcp://HOST:PORT", port 0 for a free one. They have to
            reach it. None: an address of this host that the platform suggests.
        code: with `platform=`, which modules of your own workers are sent: "auto", those that the dataset needs; a list
            of files and folders, these besides; None, none, where workers have them.
        min_workers: with `platform=`, how many workers have to be there before the first batch is loaded.
        local_workers: with `platform=`, how many of `num_workers` are processes of this host, as without it; the
            others are the platform's. Those of this host have the lowest numbers.

        watch: HOST:PORT, as "127.0.0.1:8265", where a browser finds a live page with the loaders of this process (extra
            `web`); None: where the environment variable DPFLOW_WATCH says, and without it nowhere. Where LOCAL_RANK is
            set, as by torchrun, it is added to the port. Beyond this machine the page takes a token, in a file that
            DPFLOW_WEB_TOKEN_FILE names.

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
    local_workers: int = 0
    watch: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_int, "read_threads", "poison_limit", minimum=1)
        check_fields(self, check_int, "local_workers", minimum=0)
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


def check_code(code: Code) -> None:
    """Raise OptionTypeError or OptionError unless this is allowed as `code`, and its paths exist."""
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
            raise OptionTypeError(f"{given}: {path!r} is no path")
        if not os.path.exists(path):
            raise OptionError(f"{given}: there is no {os.fspath(path)!r} in {os.getcwd()}")
        if not os.path.isfile(path) and not os.path.isdir(path):
            raise OptionError(
                f"{given}: {os.fspath(path)!r} is a device, pipe or socket; give files and directories"
            )
