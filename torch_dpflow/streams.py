"""An iterable dataset's stream of batches: where it is, and how to come back there."""

from collections.abc import Callable
from typing import Any

from torch_dpflow.errors import StateError


def has_state(part: Any) -> bool:
    """Whether `part` keeps a state of its own that can be given back to it."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


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
        if state is not None and state["of"] == "dataset":
            _load(dataset, state["value"])
        self._fetcher = make_fetcher()
        if state is not None and state["of"] == "iterator":
            _load(self._fetcher.dataset_iter, state["value"])
        if state is not None and state["ended"]:
            self._fetcher.ended = True
        if state is None and skip:
            self._pass_over(skip * (batch_size or 1))

    def fetch(self, index: Any) -> Any:
        """The next batch. Raises StopIteration at the end of the stream."""
        return self._fetcher.fetch(index)

    def state(self) -> dict[str, Any] | None:
        """The position after the latest batch, kept by the iterator or the dataset; None if neither does."""
        # With its last, short batch a dataset has come to its end, and may already be back at its beginning.
        ended = bool(getattr(self._fetcher, "ended", False))
        for of, part in (("iterator", self._fetcher.dataset_iter), ("dataset", self._dataset)):
            if has_state(part):
                return {"of": of, "value": part.state_dict(), "ended": ended}
        return None

    def _pass_over(self, samples: int) -> None:
        for _ in range(samples):
            try:
                next(self._fetcher.dataset_iter)
            except StopIteration:
                # A short last batch was delivered before: the end of the stream is where it was.
                self._fetcher.ended = True
                return


def _load(part: Any, value: Any) -> None:
    if not has_state(part):
        raise StateError(
            f"the state holds a position kept by the data set, but {type(part).__name__} has no load_state_dict(); "
            "resume with the data set that the state was taken with"
        )
    part.load_state_dict(value)
