"""An iterable dataset's stream of batches: its position, and how to restore it."""

from collections.abc import Callable
from typing import Any

from torch_dpflow.epoch.own_state import Unsaved, ask, give_back, has_state


def at_rest(dataset: Any) -> dict[str, Any] | Unsaved | None:
    """As `Stream.state`, for a dataset that nobody iterates: between epochs, and of map-style ones always."""
    kept = ask(dataset)
    if kept is None or isinstance(kept, Unsaved):
        return kept
    return {"dataset": kept, "iterator": None, "ended": False}


def ended(kept: Any) -> Any:
    """A state of `Stream.state`, marked as the end of its iteration."""
    return {**kept, "ended": True} if isinstance(kept, dict) else kept


def return_dataset(dataset: Any, kept: dict[str, Any]) -> None:
    """Restore `dataset`, so that its next iteration begins as it would have after the saved one.

    Raises:
        StateError: it, or its iterator, cannot take its state.
    """
    if kept["dataset"] is not None and not _stands_at(dataset, kept["dataset"]):
        give_back(dataset, kept["dataset"], "dataset")
    if kept["ended"]:
        # Restored to the end of its iteration; the next `iter` begins the next one.
        iterator = iter(dataset)
        if kept["iterator"] is not None:
            give_back(iterator, kept["iterator"], "dataset")


def _stands_at(dataset: Any, state: Any) -> bool:
    try:
        return bool(ask(dataset) == state)
    except Exception:  # such as tensors, whose comparison has no truth value
        return False


class Stream:
    """The batches that one copy of an iterable dataset yields, one after the other.

    Args:
        dataset: the iterable dataset.
        make_fetcher: makes torch's fetcher for it, which calls `iter(dataset)`.
        state: what `state()` gave earlier, or None to begin at the beginning.
        skip: batches to pass over; only without `state`.
        batch_size: samples in one batch, None where the dataset yields whole batches.
    """

    def __init__(
        self, dataset: Any, make_fetcher: Callable[[], Any], *, state: Any, skip: int, batch_size: int | None
    ) -> None:
        self._dataset = dataset
        # The dataset first: its iterator may start from the dataset's position.
        if state is not None and state["dataset"] is not None:
            give_back(dataset, state["dataset"], "dataset")
        self._fetcher = make_fetcher()
        if state is not None and state["iterator"] is not None:
            give_back(self._fetcher.dataset_iter, state["iterator"], "dataset")
        if state is not None and state["ended"]:
            self._fetcher.ended = True
        if state is None and skip:
            self._pass_over(skip * (batch_size or 1))

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
        of_iterator = ask(iterator)
        # A dataset that is its own iterator has one state, which it takes after `iter`.
        of_dataset = ask(self._dataset) if iterator is not self._dataset else None
        for state in (of_iterator, of_dataset):
            if isinstance(state, Unsaved):
                return state
        if of_iterator is None and of_dataset is None:
            return None
        return {"dataset": of_dataset, "iterator": of_iterator, "ended": short}

    def _pass_over(self, samples: int) -> None:
        for _ in range(samples):
            try:
                next(self._fetcher.dataset_iter)
            except StopIteration:
                # The last, short batch was delivered before: the stream was at its end.
                self._fetcher.ended = True
                return
