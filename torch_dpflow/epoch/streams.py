"""An iterable dataset's stream of batches: its position, and how to restore it."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from torch_dpflow.epoch.own_state import Unsaved, has_state, restore_state, state_of


def at_rest(dataset: Any) -> dict[str, Any] | Unsaved | None:
    """As `Stream.state`, for a dataset that is not being iterated: between epochs, and for map-style ones always."""
    kept = state_of(dataset)
    if kept is None or isinstance(kept, Unsaved):
        return kept
    return {"dataset": kept, "iterator": None, "ended": False}


def ended(kept: Any) -> Any:
    """A state of `Stream.state`, marked as the end of its iteration."""
    return {**kept, "ended": True} if isinstance(kept, dict) else kept


def return_dataset(dataset: Any, kept: dict[str, Any]) -> None:
    """Restore `dataset`, so that its next iteration begins as it would have after the saved one.

    Raises:
        StateError: it, or its iterator, cannot restore its state.
    """
    # An iterable one that loads a state may begin its next iteration there, also where it had not moved from it.
    if kept["dataset"] is not None and not (
        isinstance(dataset, IterableDataset) and _equals_state(dataset, kept["dataset"])
    ):
        restore_state(dataset, kept["dataset"], "dataset")
    if kept["ended"]:
        # Restored to the end of its iteration; the next `iter` begins the next one.
        iterator = iter(dataset)
        if kept["iterator"] is not None:
            restore_state(iterator, kept["iterator"], "dataset")


def _equals_state(dataset: Any, state: Any) -> bool:
    try:
        return bool(state_of(dataset) == state)
    except Exception:  # such as tensors, whose comparison has no truth value
        return False


class Stream:
    """The batches that one copy of an iterable dataset yields, one after the other.

    Args:
        dataset: the iterable dataset.
        make_fetcher: makes torch's fetcher for it, which calls `iter(dataset)`.
        state: an earlier result of `state()`; None: begin at the beginning.
        skip: batches to skip; only without `state`.
        batch_size: samples in one batch, None if the dataset yields whole batches.
    """

    def __init__(
        self, dataset: Any, make_fetcher: Callable[[], Any], *, state: Any, skip: int, batch_size: int | None
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
        if state is None and skip:
            self._skip(skip * (batch_size or 1))

    def fetch(self, index: Any) -> Any:
        """The next batch. Raises StopIteration at the end of the stream."""
        return self._fetcher.fetch(index)

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset or its iterator has a state of its own."""
        return has_state(self._dataset) or has_state(self._fetcher.dataset_iter)

    def state(self) -> dict[str, Any] | Unsaved | None:
        """The position after the latest batch, kept by the dataset and its iterator; None if neither does."""
        # With a short batch a dataset has reached its end, and may already have reset itself.
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

    def _skip(self, samples: int) -> None:
        for _ in range(samples):
            try:
                next(self._fetcher.dataset_iter)
            except StopIteration:
                # The last, short batch was delivered before: the stream was at its end.
                self._fetcher.ended = True
                return
