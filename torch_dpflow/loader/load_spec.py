"""What a loader's workers load, and whether batches are bound to workers."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from torch_dpflow._core.torch_private import DatasetKind, sharding_worker_init_fn
from torch_dpflow.epoch.own_state import has_state
from torch_dpflow.ipc.memory.headroom import machine_total
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers.batches import SHARED_FRACTION, LoadSpec
from torch_dpflow.workers.script_settings import ScriptSettings


def load_spec(iterator: Any, loader: Any, options: LoaderOptions, *, own_stream: bool) -> LoadSpec:
    """The specification for all workers of this iterator, which derives from torch's."""
    worker_init_fn = loader.worker_init_fn
    if isinstance(iterator._dataset, IterDataPipe | MapDataPipe):
        worker_init_fn = functools.partial(
            sharding_worker_init_fn, worker_init_fn, iterator._world_size, iterator._rank
        )
    shared_memory = options.shared_memory
    if shared_memory is None and loader.platform is None:
        shared_memory = machine_total() // SHARED_FRACTION // iterator._num_workers
    return LoadSpec(
        dataset=iterator._dataset,
        dataset_kind=iterator._dataset_kind,
        auto_collation=iterator._auto_collation,
        collate_fn=iterator._collate_fn,
        drop_last=iterator._drop_last,
        batch_size=loader.batch_size,
        worker_init_fn=worker_init_fn,
        num_workers=int(iterator._num_workers),
        base_seed=int(iterator._base_seed),
        own_stream=own_stream,
        read_threads=options.read_threads,
        shared_memory=shared_memory,
        settings=None if loader.platform is None else ScriptSettings.capture(),
    )


def has_own_streams(loader: Any, options: LoaderOptions) -> bool:
    """Whether batches are bound to workers, each of which has a random stream of its own."""
    if loader._dataset_kind == DatasetKind.Iterable or options.seeding == "worker":
        return True
    if has_state(loader.dataset):  # its state depends on what the worker loaded before
        return True
    return options.seeding == "auto" and loader.worker_init_fn is not None
