"""Fetches the samples of a batch with threads, and wraps errors as torch's worker does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.errors import NotPicklableError


class ThreadedFetcher:
    """Reads the samples of a batch with several threads, so that their waits overlap.

    The order of the samples, and the argument of `collate_fn`, are as without threads.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], threads: int) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        # numpy's error settings belong to a thread; these threads take over those of the worker.
        settings = partial(np.seterr, **np.geterr())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dpflow-read", initializer=settings)

    def fetch(self, index: Any) -> Any:
        """The batch of these indices."""
        return self._collate_fn(list(self._pool.map(self._dataset.__getitem__, index)))


def failure(worker: int, *, dataset: Any = None, index: Any = None) -> ExceptionWrapper:
    """The exception that is being handled, with this worker's traceback, for the loader to raise.

    For an index beyond the dataset's length, its text says so.
    """
    wrapper = ExceptionWrapper(where=f"in DataLoader worker process {worker}")
    if not _can_be_raised(wrapper.exc_type):
        wrapper.exc_type = RuntimeError
    if dataset is not None and issubclass(wrapper.exc_type, IndexError | KeyError):
        wrapper.exc_msg += _length_hint(dataset, index)
    return wrapper


def _can_be_raised(kind: Any) -> bool:
    """Whether `ExceptionWrapper.reraise` can make it: a type with a `message` it calls with that keyword."""
    if getattr(kind, "message", None):
        try:
            kind(message="")
        except Exception:
            return False
    return True


def unpicklable_failure(worker: int, error: NotPicklableError) -> ExceptionWrapper:
    """As `failure`, for a batch that was loaded but cannot be pickled."""
    return ExceptionWrapper(
        (type(error), error, error.__traceback__), f"in DataLoader worker process {worker}"
    )


def _length_hint(dataset: Any, index: Any) -> str:
    try:
        length = len(dataset)
        beyond = [i for i in (index if isinstance(index, list) else [index]) if not -length <= i < length]
    except Exception:
        return ""
    if not beyond:
        return ""
    return (
        f"\nThe batch asks for index {beyond[0]}, but the dataset's length is {length} in this worker. The sampler "
        "was made for another length: make the sampler and the loader anew after a change of the dataset, and let "
        "__len__ give the same number in every process.\n"
    )
