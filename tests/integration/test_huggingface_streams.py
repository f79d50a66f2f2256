"""HuggingFace's shuffled iterable datasets, resumed: each worker's copy keeps the state of its own shards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SHARDS, ROWS, BUFFER = 4, 15, 8


class ShuffledShards(IterableDataset):
    """As `datasets` does it: shards by worker, in a shuffled order, through a buffer whose content is not kept.

    The state is a list for the worker's shards. It is taken when the next iteration asks for its first sample, and
    stays for all iterations of the same epoch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._state: dict[str, Any] | None = None
        self._starting: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        order = list(range(SHARDS))
        random.Random(self.epoch).shuffle(order)
        rng = random.Random(100 * self.epoch + worker)
        self._state = {"epoch": self.epoch, "rows": [0 for _ in order[worker::workers]]}
        if self._starting is not None and self._starting["epoch"] == self.epoch:
            self._state["rows"] = [self._starting["rows"][n] for n in range(len(self._state["rows"]))]
        buffer: list[int] = []
        for row in self._read(order[worker::workers]):
            if len(buffer) < BUFFER:
                buffer.append(row)
                continue
            place = rng.randrange(BUFFER)
            buffer[place], row = row, buffer[place]
            yield row
        rng.shuffle(buffer)
        yield from buffer

    def _read(self, shards: list[int]) -> Iterator[int]:
        assert self._state is not None
        rows = self._state["rows"]
        for number, shard in enumerate(shards):
            while rows[number] < ROWS:
                rows[number] += 1
                yield ROWS * shard + rows[number] - 1

    def state_dict(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting = state


def plain(batches: Any) -> list[list[int]]:
    return [(batch["row"] if isinstance(batch, dict) else batch).tolist() for batch in batches]


def huggingface(shuffled: bool) -> Any:
    rows = pytest.importorskip("datasets").Dataset.from_dict({"row": list(range(SHARDS * ROWS))})
    stream = rows.to_iterable_dataset(num_shards=SHARDS)
    return stream.shuffle(seed=1, buffer_size=BUFFER) if shuffled else stream


DATASETS: dict[str, Callable[[], Any]] = {
    "alike": ShuffledShards,
    "its own": lambda: huggingface(shuffled=False),
    "its own, shuffled": lambda: huggingface(shuffled=True),
}


def histories(loader_class: Any, dataset: str, **arguments: Any) -> list[Any]:
    """What a run delivers, and what loaders deliver that go on from its states in two epochs; or the error."""

    def make() -> Any:
        return loader_class(DATASETS[dataset](), batch_size=4, **arguments)

    loader = make()
    iterator = iter(loader)
    found: list[Any] = [plain([next(iterator)])]
    states = [loader.state_dict()]
    found[0] += plain([next(iterator) for _ in range(4)])
    states.append(loader.state_dict())
    found[0] += plain(iterator)
    states.append(loader.state_dict())
    for state in states:
        again = make()
        again.load_state_dict(state)
        try:
            found.append([plain(again), plain(again)])
        except Exception as error:  # `datasets` 5.2 cannot take back what its workers have kept of shuffled data
            found.append(type(error))
    return found


WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "two": {"num_workers": 2},
    "kept": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        # `datasets` takes seconds in each worker; what is alike has all kinds.
        pytest.param(name, workers, marks=[pytest.mark.slow] if kind == "kept" and name != "alike" else [])
        for name in DATASETS
        for kind, workers in WORKERS.items()
    ],
)
def test_it_goes_on_as_under_torchdatas_loader(OurLoader: Any, dataset: str, workers: Any) -> None:
    theirs = histories(stateful.StatefulDataLoader, dataset, **workers)
    ours = histories(OurLoader, dataset, **workers)
    assert ours == theirs
    assert sorted(row for batch in ours[0] for row in batch) == list(range(SHARDS * ROWS))


def test_an_epoch_without_a_batch_after_the_datasets_end_is_told(OurLoader: Any, caplog: Any) -> None:
    """Its state says that it is at its end; `set_epoch` begins another one."""
    loader = OurLoader(ShuffledShards(), batch_size=4)
    plain(loader)
    again = OurLoader(ShuffledShards(), batch_size=4)
    again.load_state_dict(loader.state_dict())
    with caplog.at_level("WARNING", logger="torch_dpflow"):
        assert plain(again) == []
    assert "set_epoch" in caplog.text
    again.dataset.set_epoch(1)
    assert len(plain(again)) == SHARDS * ROWS // 4
