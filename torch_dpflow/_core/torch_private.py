"""The private names of torch that the package uses, under public names, and checks that the installed torch has them.

torch may move or drop a private name in any release. A missing name raises UnsupportedTorchError when this module is
imported (that of `default_store` only when it is called), not in the middle of a training run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from torch_dpflow.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "ITERATOR_ATTRIBUTES",
    "LOADER_ATTRIBUTES",
    "TESTED",
    "BaseDataLoaderIter",
    "DatasetKind",
    "ExceptionWrapper",
    "antialiased",
    "collate",
    "collate_tensor_fn",
    "default_collate_fn_map",
    "default_store",
    "generate_state",
    "is_profiled",
    "mark_for_profilers",
    "pin_memory",
    "set_worker_info",
    "set_worker_signal_handlers",
    "sharding_worker_init_fn",
    "tree_flatten",
    "tree_unflatten",
    "typed_storage",
    "untyped_storage",
]

#: Oldest and newest release of torch with which the loader's contract tests run (`make test-versions`).
TESTED = ("2.6", "2.13")
#: Attributes of torch's loader, and of its iterator, that the package reads, sets or overrides.
LOADER_ATTRIBUTES = ("_auto_collation", "_dataset_kind", "_get_iterator", "_index_sampler", "_iterator")
ITERATOR_ATTRIBUTES = (
    "_auto_collation",
    "_base_seed",
    "_collate_fn",
    "_dataset",
    "_dataset_kind",
    "_drop_last",
    "_index_sampler",
    "_next_data",
    "_num_workers",
    "_num_yielded",
    "_persistent_workers",
    "_pin_memory",
    "_pin_memory_device",
    "_profile_name",
    "_rank",
    "_reset",
    "_sampler_iter",
    "_shared_seed",
    "_timeout",
    "_world_size",
)


def _unsupported(missing: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} lacks a name that torch_dpflow needs: {missing}. torch_dpflow is tested with torch "
        f"{TESTED[0]} to {TESTED[1]}: install one of these, or a release of torch_dpflow for this torch"
    )


try:
    from torch._C import _nn as _functions
    from torch._C import _set_worker_signal_handlers as set_worker_signal_handlers
    from torch._C._profiler import _RecordFunctionFast as mark_for_profilers
    from torch._utils import ExceptionWrapper
    from torch.autograd import profiler as _profiler
    from torch.utils._pytree import tree_flatten, tree_unflatten
    from torch.utils.data._utils import pin_memory as _pin_memory
    from torch.utils.data._utils import worker as _worker
    from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map
    from torch.utils.data._utils.worker import _generate_state as generate_state
    from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
    from torch.utils.data.dataloader import _DatasetKind as DatasetKind
    from torch.utils.data.dataloader import _sharding_worker_init_fn as sharding_worker_init_fn
except ImportError as error:
    raise _unsupported(str(error)) from error


#: The functions behind `torch.nn.functional.interpolate` with antialiasing, by mode; unlike it, they have an argument
#: `out`. The other arguments are image, size, align_corners and scales (None).
antialiased: dict[str, Callable[..., torch.Tensor]] = {}


def is_profiled() -> bool:
    """Return whether a profiler of torch that was started from Python is running in this process."""
    return _profiler._is_profiler_enabled


def pin_memory(batch: Any, device: str | None) -> Any:
    """Copy the batch to pinned memory as torch's loader does."""
    return _pin_memory.pin_memory(batch, device)


def set_worker_info(*, worker: int, workers: int, seed: int, dataset: Any) -> None:
    """Set the result of `torch.utils.data.get_worker_info()` in this process."""
    _worker._worker_info = _worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage with a type, for torch's functions that rebuild tensors, without torch's warning."""
    typed: Any = torch.TypedStorage
    wrapped: torch.TypedStorage = typed(wrap_storage=storage, dtype=dtype, _internal=True)
    return wrapped


def untyped_storage(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the storage inside a typed storage, without torch's warning."""
    return storage._untyped_storage


def default_store() -> Store:
    """Return the store of torch.distributed's default process group. Raises UnsupportedTorchError if torch lacks it."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError as error:
        raise _unsupported(str(error)) from error
    return _get_default_store()


def _check() -> None:
    """Check attributes that an import does not show. Draws no random number from a shared generator."""
    # The generator is on the CPU, and torch draws on the default device.
    with torch.device("cpu"):
        loader = DataLoader([0], generator=torch.Generator())  # type: ignore[arg-type, var-annotated]
        iterator = BaseDataLoaderIter(loader)
    failure = ExceptionWrapper((ValueError, ValueError(), None), "")
    demands: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (loader, LOADER_ATTRIBUTES),
        (iterator, ITERATOR_ATTRIBUTES),
        (failure, ("exc_msg", "exc_type", "reraise", "where")),
        (DatasetKind, ("Iterable", "create_fetcher")),
        (_worker, ("WorkerInfo", "_worker_info")),
        (_pin_memory, ("pin_memory",)),
    )
    for thing, names in demands:
        for name in names:
            if not hasattr(thing, name):
                whose = thing if hasattr(thing, "__name__") else type(thing)
                raise AttributeError(f"{whose.__name__} has no {name}")
    untyped_storage(typed_storage(torch.UntypedStorage(0), torch.uint8))
    for mode in ("bilinear", "bicubic"):
        antialiased[mode] = getattr(_functions, f"_upsample_{mode}2d_aa")


try:
    _check()
except (AttributeError, TypeError) as error:
    raise _unsupported(str(error)) from error
