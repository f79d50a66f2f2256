"""ShardedIterableDataset: an iterable dataset whose position is saved by shard, so that other workers can continue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torch_dpflow._core.checks import check_int
from torch_dpflow._core.ranks import own_rank
from torch_dpflow.errors import StateError

#: The position of a shard that was read to its end.
_ENDED = -1
_KEYS = {"num_shards", "num_replicas", "ranks", "shards"}


class ShardedIterableDataset(IterableDataset[Any]):
    """Base class of iterable datasets whose position is saved by shard. A subclass implements `read_shard`.

    Rank `r` of `R` reads the shards `r`, `r + R`, and so on. Its workers divide these in the same way. A loader's state
    contains the position in each shard, so a different number of workers or ranks can read the remaining epoch. The
    batches then differ, because each worker fills its own batches.

    Give at least as many shards as there are workers in all ranks; further workers read nothing. Ranks read equal
    numbers of samples only if their shards contain equal numbers.

    Args:
        num_shards: number of shards.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh or a process group that defines both.

    Raises:
        OptionError: a number is out of range, or `ranks` cannot be used.
        OptionTypeError: an argument is of the wrong type.
    """

    def __init__(
        self, num_shards: int, *, num_replicas: int | None = None, rank: int | None = None, ranks: Any = None
    ) -> None:
        self.num_shards = check_int("num_shards", num_shards, minimum=1)
        self.num_replicas, self.rank, _ = own_rank(num_replicas, rank, ranks)
        #: By shard: samples that were read, or `_ENDED`.
        self._read: dict[int, int] = {}
        self._loaded: dict[int, int] | None = None

    @abstractmethod
    def read_shard(self, number: int, start: int) -> Iterator[Any]:
        """Yield the samples of a shard, starting at sample `start`. Their order must not change within an epoch."""

    def __iter__(self) -> Iterator[Any]:
        self._read, self._loaded = dict(self._loaded or {}), None
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        worker = get_worker_info()
        count, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for number in range(self.rank, self.num_shards, self.num_replicas)[own::count]:
            start = self._read.get(number, 0)
            if start == _ENDED:
                continue
            for sample in self.read_shard(number, start):
                self._read[number] = self._read.get(number, 0) + 1
                yield sample
            self._read[number] = _ENDED

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each shard that this copy has begun to read, or whose position it has loaded."""
        read = self._read if self._loaded is None else self._loaded
        return {
            "num_shards": self.num_shards,
            "num_replicas": self.num_replicas,
            "ranks": [self.rank],
            "shards": {str(number): position for number, position in sorted(read.items())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at these positions. Raises StateError if they do not fit this dataset."""
        check_shards(state, self.num_shards, self.num_replicas, self.rank)
        self._loaded = {int(number): position for number, position in state["shards"].items()}


def check_shards(state: Any, num_shards: int, num_replicas: int, rank: int) -> None:
    """Raise StateError if a state has another form or number of shards, or lacks positions of shards of this rank."""
    if not is_of_shards(state):
        raise StateError(f"{state!r:.100} is no state of a ShardedIterableDataset; give what state_dict() returned")
    if state["num_shards"] != num_shards:
        raise StateError(
            f"the state is of a dataset of {state['num_shards']} shards, this one has {num_shards}; resume with the "
            "dataset that it was taken with"
        )
    is_whole = len(state["ranks"]) == state["num_replicas"]
    if not is_whole and (state["num_replicas"] != num_replicas or rank not in state["ranks"]):
        raise StateError(
            f"the state has the shards of the ranks {state['ranks']} of {state['num_replicas']}, and this is rank "
            f"{rank} of {num_replicas}: give load_state_dict() a list of the states of all ranks"
        )


def is_of_shards(state: Any) -> bool:
    """Return whether a dataset's own state is that of a `ShardedIterableDataset`."""
    if not isinstance(state, dict) or state.keys() != _KEYS or not isinstance(state["shards"], dict):
        return False
    numbers = [state["num_shards"], state["num_replicas"], *state["shards"].values()]
    if not all(type(number) is int for number in numbers) or not isinstance(state["ranks"], list):
        return False
    names = state["shards"]
    return all(name.isdecimal() and int(name) < state["num_shards"] for name in names) and all(
        position >= _ENDED for position in names.values()
    )


def merged_shards(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the states of all copies of a dataset, in workers or ranks, into one with the positions of all shards.

    The furthest position of each shard counts: a resumed copy also has old positions of shards that other copies read.

    Raises StateError: the states differ in their number of shards or of ranks.
    """
    first = states[0]
    shards: dict[str, int] = {}
    for state in states:
        if (state["num_shards"], state["num_replicas"]) != (first["num_shards"], first["num_replicas"]):
            raise StateError("the states are of datasets with other shards or numbers of ranks; give those of one run")
        for name, position in state["shards"].items():
            before = shards.get(name, 0)
            shards[name] = _ENDED if _ENDED in (before, position) else max(before, position)
    ranks = sorted({rank for state in states for rank in state["ranks"]})
    return {**first, "ranks": ranks, "shards": shards}
