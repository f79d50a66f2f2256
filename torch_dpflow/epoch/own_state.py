"""Own states of datasets, samplers and their iterators: saving and restoring what their `state_dict` returns.

A `state_dict` that fails does not stop the iteration. The loader's `state_dict` raises the error later.
"""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import IterableDataset

from torch_dpflow._core.checks import working
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.epoch.rng import preserved_rng
from torch_dpflow.errors import StateError, UsageError


def has_state(part: Any) -> bool:
    """Return whether `part` has a state: methods `state_dict` and `load_state_dict`."""
    return callable(working(part, "state_dict")) and callable(working(part, "load_state_dict"))


class Unsaved:
    """Placeholder for a state that could not be saved. Construct it in an `except` block, whose exception it keeps."""

    def __init__(self, part: Any) -> None:
        self.part = type(part).__name__
        self._failure = ExceptionWrapper(where=f"in the state_dict() of a {self.part}")
        try:
            pickle.dumps(self._failure)
        except Exception:  # its class cannot be pickled; its text can
            self._failure.exc_type = RuntimeError

    def reraise(self) -> None:
        """Raise StateError, caused by a copy of the kept exception, or by a RuntimeError with its text."""
        try:
            self._failure.reraise()
        except UsageError as cause:  # of a sampler of this package
            raise StateError(
                f"the position cannot be saved: the {self.part} is no longer where the iteration is ({cause}); save "
                "the state before set_epoch() and load_state_dict() of the sampler, or after the next iteration began"
            ) from cause
        except Exception as cause:
            raise StateError(
                f"the position cannot be saved: the state_dict() of {self.part} failed "
                f"({self._failure.exc_type.__name__}); let it take no arguments and return what can be pickled, or "
                "give the dataset or sampler none, so that the loader skips what was delivered"
            ) from cause


class Pickled:
    """The pickled state of `part`, in transit between processes."""

    def __init__(self, part: Any, value: Any) -> None:
        self.part = type(part).__name__
        self._bytes = pickle.dumps(value)

    def open(self) -> Any:
        """Return the unpickled state. Raises any error of unpickling."""
        return pickle.loads(self._bytes)


def state_of(part: Any, **arguments: Any) -> Any:
    """Return `part.state_dict(**arguments)`; None if `part` has no state, `Unsaved` if that call fails."""
    try:
        return part.state_dict(**arguments) if has_state(part) else None
    except Exception:
        return Unsaved(part)


def copied_state_of(part: Any, **arguments: Any) -> Any:
    return copied(part, state_of(part, **arguments))


def copied(part: Any, state: Any) -> Any:
    """Return a deep copy of `state`, which is the state of `part`; `Unsaved` if it cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception:
        return Unsaved(part)


def takes(part: Any, argument: str) -> bool:
    """Return whether `part` has a state, and its `state_dict` takes this argument."""
    try:
        return has_state(part) and argument in inspect.signature(part.state_dict).parameters
    except Exception:  # not every function has a signature
        return False


def sealed(part: Any, state: Any) -> Any:
    """Return the state of `part` as `Pickled`, or `Unsaved` if that fails. None and `Unsaved` stay unchanged."""
    if state is None or isinstance(state, Unsaved):
        return state
    try:
        return Pickled(part, state)
    except Exception:
        return Unsaved(part)


def opened(state: Any) -> Any:
    """Return the state in a result of `sealed` or `state_of`. Raises StateError for `Unsaved`, or if unreadable."""
    if isinstance(state, Unsaved):
        state.reraise()
    if not isinstance(state, Pickled):
        return state
    try:
        return state.open()
    except Exception as error:
        raise StateError(
            f"what {state.part}.state_dict() returned in a worker cannot be unpickled here ({error!r}); let it return "
            "plain values"
        ) from error


def restore_state(part: Any, state: Any, kind: str) -> None:
    """Pass a copy of `state` to `part.load_state_dict`. Raises StateError if not `has_state(part)`, or if it fails.

    kind: "dataset" or "sampler", for error messages.
    """
    if not has_state(part):
        raise StateError(
            f"the state holds that of a {kind}, but {type(part).__name__} has no load_state_dict(); resume with the "
            f"{kind} that the state was taken with"
        )
    try:
        part.load_state_dict(copy.deepcopy(state))  # a copy, because it may change its argument later
    except Exception as error:
        raise StateError(
            f"{type(part).__name__}.load_state_dict() failed on the state of the {kind} ({error!r}); resume with the "
            f"{kind} that the state was taken with, or begin an epoch again"
        ) from error


def restore_sampler(sampler: Any, state: Any, *, begun: bool) -> None:
    """Restore a sampler from `state`. If the sampler has a `named_epoch`, which `set_epoch` sets, that epoch stays.

    begun: whether the state was taken in mid-epoch. It must then be of the epoch in `named_epoch`, if there is one.

    Raises StateError as `restore_state` does, or if `begun` and these epochs differ.
    """
    named = working(sampler, "named_epoch")
    restore_state(sampler, state, "sampler")
    if named is None or (begun and named == sampler.epoch):
        return
    was = sampler.epoch
    sampler.set_epoch(named)
    if begun:
        raise StateError(
            f"the state was taken in epoch {was} of a {type(sampler).__name__}, and this one is at epoch {named}; "
            f"call set_epoch({was}) before the iteration. A wrapper that counts epochs itself, as Fabric's, sets epoch "
            "0: iterate the loader itself"
        )


def at_rest(dataset: Any) -> dict[str, Any] | Unsaved | None:
    """Return a dataset's state between iterations, in the form of `Stream.state`; None or `Unsaved` as there."""
    kept = state_of(dataset)
    if kept is None or isinstance(kept, Unsaved):
        return kept
    return {"dataset": kept, "iterator": None, "ended": False}


def ended(kept: Any) -> Any:
    """Return `kept`, a result of `Stream.state`, marked as the state at the end of an iteration."""
    return {**kept, "ended": True} if isinstance(kept, dict) else kept


def return_dataset(dataset: Any, kept: dict[str, Any]) -> None:
    """Restore a dataset so that its next iteration begins as it would have begun after `kept` was saved.

    kept: result of `Stream.state` or `at_rest`. The process's random generators stay unchanged.

    Raises StateError: the dataset or its iterator cannot restore its state.
    """
    of_dataset, of_iterator = kept["dataset"], kept["iterator"]
    if of_dataset is None and kept["ended"] and has_state(dataset):  # it is its own iterator
        of_dataset, of_iterator = of_iterator, None
    with preserved_rng():
        _restore_dataset(dataset, of_dataset)
        if kept["ended"] and not _is_over(dataset, of_dataset, of_iterator):
            _restore_dataset(dataset, of_dataset)  # it is at the beginning of its next iteration already


def _restore_dataset(dataset: Any, state: Any) -> None:
    # An iterable dataset that loads a state may begin its next iteration there, even if it was there already.
    if state is not None and not (isinstance(dataset, IterableDataset) and _equals_state(dataset, state)):
        restore_state(dataset, state, "dataset")


def _is_over(dataset: Any, of_dataset: Any, of_iterator: Any) -> bool:
    """Iterate a dataset that was restored to the end of an iteration; return whether that yields nothing.

    A dataset may use the restored position only when it is iterated: a generator runs none of its code before.
    """
    iterator = iter(dataset)
    if of_iterator is not None:
        restore_state(iterator, of_iterator, "dataset")
    try:
        next(iterator)
    except StopIteration:
        # Another state: to begin the iteration has changed it, as one that counts epochs.
        return of_dataset is None or _equals_state(dataset, of_dataset)
    except Exception:  # of its first sample, which will be read again
        return False
    return False


def _equals_state(dataset: Any, state: Any) -> bool:
    own = state_of(dataset)
    with suppress(Exception):  # such as tensors, whose comparison has no truth value
        return bool(own == state)
    with suppress(Exception):
        return _as_bytes(own) == _as_bytes(state)
    return False


def _as_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class Stream:
    """Stream of the batches of one copy of an iterable dataset; its position can be saved and restored.

    Args:
        make_fetcher: makes torch's fetcher for the dataset, which calls `iter(dataset)`.
        state: an earlier result of `state()`; None for the beginning.
        skip: number of batches to skip; only without `state`.
        failed: how many of the skipped batches may raise an error, because they raised it when they were delivered.
        batch_size: number of samples in a batch; None if the dataset yields whole batches.
    """

    def __init__(
        self,
        dataset: Any,
        make_fetcher: Callable[[], Any],
        *,
        state: Any,
        skip: int,
        batch_size: int | None,
        failed: int = 0,
    ) -> None:
        self._dataset = dataset
        # The dataset first: its iterator may start from the dataset's position.
        if state is not None and state["dataset"] is not None:
            restore_state(dataset, state["dataset"], "dataset")
        self._fetcher = make_fetcher()
        if state is not None and state["iterator"] is not None:
            restore_state(self._fetcher.dataset_iter, state["iterator"], "dataset")
        if state is not None and state["ended"]:
            self._fetcher.ended = True
        if state is None:
            self._skip(skip, batch_size or 1, failed)

    def fetch(self, index: Any) -> Any:
        """Return the next batch. Raises StopIteration at and after the stream's end. index: as in torch's `fetch`."""
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self._fetcher.ended = True  # an iterator that is asked again may begin another epoch
            raise

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset or its iterator has a state."""
        return has_state(self._dataset) or has_state(self._fetcher.dataset_iter)

    def state(self) -> dict[str, Any] | Unsaved | None:
        """Return a dict: the own states of "dataset" and "iterator", and whether the stream has "ended".

        Returns None if neither has a state, and `Unsaved` if a `state_dict` failed.
        """
        # With a short batch a dataset has reached its end, and may have reset itself.
        short = bool(getattr(self._fetcher, "ended", False))
        iterator = self._fetcher.dataset_iter
        of_iterator = state_of(iterator)
        # A dataset that is its own iterator has one state, which is restored after `iter`.
        of_dataset = state_of(self._dataset) if iterator is not self._dataset else None
        for state in (of_iterator, of_dataset):
            if isinstance(state, Unsaved):
                return state
        if of_iterator is None and of_dataset is None:
            return None
        return {"dataset": of_dataset, "iterator": of_iterator, "ended": short}

    def _skip(self, batches: int, batch_size: int, failed: int) -> None:
        for _ in range(batches):
            try:
                for _ in range(batch_size):
                    next(self._fetcher.dataset_iter)
            except StopIteration:
                # The last, short batch was delivered before: the stream was at its end.
                self._fetcher.ended = True
                return
            except Exception:
                # The error ended its batch, as it did in the saved iteration.
                if not failed:
                    raise
                failed -= 1
