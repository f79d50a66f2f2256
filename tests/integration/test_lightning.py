"""Under Lightning, which rebuilds a loader from its class and its attributes to put another sampler in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from tests.later import Later
from tests.loader_cases import Augmented, Indices, WhoLoads
from torch_dpflow import DynaGCSSampler, ShardedIterableDataset
from torch_dpflow.options import LoaderOptions

lightning = Later("lightning.pytorch")
pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed"),
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers.*",
        "ignore:.*Checkpoint directory.*",
        "ignore:.*mid-epoch.*",
        "ignore:.*The number of training batches.*",
        "ignore::DeprecationWarning:lightning",
        "ignore::FutureWarning:lightning",
    ),
]


@pytest.fixture(scope="module")
def Recorder() -> Any:
    class Recorder(lightning.LightningModule):
        """Trains one weight and remembers every batch."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[tuple[int, list[list[float]]]] = []

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            self.seen.append((self.current_epoch, [column.tolist() for column in batch]))
            return self.weight * batch[0].float().mean()

        def predict_step(self, batch: Any, _number: int) -> list[int]:
            return batch[0].tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Recorder


def trainer(**arguments: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "barebones": False}
    return lightning.Trainer(accelerator="cpu", **{"enable_checkpointing": False, **quiet, **arguments})


def test_fit_reads_through_our_workers(OurLoader: Any, Recorder: Any) -> None:
    model = Recorder()
    loader = OurLoader(WhoLoads(12), batch_size=3, num_workers=2)
    fitting = trainer(max_epochs=2)
    fitting.fit(model, loader)
    assert fitting.train_dataloader is loader
    assert loader.stats().batches == 8
    for epoch in range(2):
        indices = [index for number, batch in model.seen if number == epoch for index in batch[0]]
        assert indices == list(range(12))
    assert {worker for _, batch in model.seen for worker in batch[1]} <= {0, 1}


def test_predict_rebuilds_the_loader_with_its_options(OurLoader: Any, Recorder: Any) -> None:
    loader = OurLoader(WhoLoads(7), batch_size=3, num_workers=1, options=LoaderOptions(read_threads=3))
    predicting = trainer()
    assert predicting.predict(Recorder(), loader) == [[0, 1, 2], [3, 4, 5], [6]]
    rebuilt = predicting.predict_dataloaders
    assert rebuilt is not loader
    assert type(rebuilt) is OurLoader
    assert rebuilt.options == loader.options
    assert rebuilt.stats().batches == 3


def test_a_distributed_sampler_is_put_in(OurLoader: Any) -> None:
    from lightning.pytorch.utilities.data import _update_dataloader

    own = torch.Generator()
    loader = OurLoader(
        WhoLoads(10),
        batch_size=2,
        shuffle=True,
        num_workers=2,
        generator=own,
        persistent_workers=True,
        options=LoaderOptions(prefetch_growth=1.0),
    )
    sampler: Any = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)
    rebuilt = _update_dataloader(loader, sampler)
    assert type(rebuilt) is OurLoader
    assert rebuilt.options is loader.options
    assert (rebuilt.num_workers, rebuilt.generator, rebuilt.persistent_workers) == (2, own, True)
    assert [index for batch in rebuilt for index in batch[0].tolist()] == [1, 3, 5, 7, 9]


def test_a_subclass_made_in_a_hook_is_rebuilt(OurLoader: Any, Recorder: Any) -> None:
    class Ours(OurLoader):  # type: ignore[misc]
        def __init__(self, size: int, **arguments: Any) -> None:
            super().__init__(WhoLoads(size), **arguments)

    class Hooked(Recorder):  # type: ignore[misc]
        def predict_dataloader(self) -> Any:
            return Ours(5, batch_size=2, num_workers=1, options=LoaderOptions(restart_limit=3))

    predicting = trainer()
    assert predicting.predict(Hooked()) == [[0, 1], [2, 3], [4]]
    assert type(predicting.predict_dataloaders) is Ours
    assert predicting.predict_dataloaders.options.restart_limit == 3


def test_a_run_resumes_in_mid_epoch(OurLoader: Any, Recorder: Any, tmp_path: Path) -> None:
    """Lightning keeps the state of a loader that has one in its checkpoint, and gives it back."""

    def loader(num_workers: int) -> Any:
        own = torch.Generator().manual_seed(3)
        return OurLoader(Augmented(20), batch_size=2, shuffle=True, num_workers=num_workers, generator=own)

    class Saving(lightning.Callback):
        def on_train_batch_end(self, run: Any, _module: Any, _outputs: Any, _batch: Any, number: int) -> None:
            if (run.current_epoch, number) == (0, 5):
                run.save_checkpoint(tmp_path / "middle.ckpt")

    whole, rest = Recorder(), Recorder()
    trainer(max_epochs=2, callbacks=[Saving()]).fit(whole, loader(2))
    trainer(max_epochs=2).fit(rest, loader(1), ckpt_path=tmp_path / "middle.ckpt", weights_only=False)
    assert len(whole.seen) == 20
    assert rest.seen == whole.seen[6:]


@pytest.mark.parametrize("kind", [DistributedSampler, DynaGCSSampler])
@pytest.mark.parametrize(
    ("at", "batches", "workers"),
    [((0, 2), 5, 0), ((1, 1), 5, 1), ((1, 4), 5, 0), ((1, 4), 5, 1), ((0, 2), 3, 0), ((1, 2), 3, 1)],
)
def test_a_rank_resumes_in_any_epoch(
    OurLoader: Any, Recorder: Any, tmp_path: Path, kind: Any, at: tuple[int, int], batches: int, workers: int
) -> None:
    """Lightning begins the iteration before it sets the epoch of the sampler, also where it goes on to the next one.

    batches: that it reads of the 5 of an epoch.
    """

    def loader() -> Any:
        sampler = kind(range(20), num_replicas=2, rank=1, seed=3)
        return OurLoader(
            Indices(20),
            batch_size=2,
            sampler=sampler,
            num_workers=workers,
            collate_fn=lambda batch: [torch.tensor(batch)],
        )

    class Saving(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, run: Any, _module: Any, _outputs: Any, _batch: Any, number: int) -> None:
            if (run.current_epoch, number) == at:
                run.save_checkpoint(tmp_path / "saved")

    whole, rest = Recorder(), Recorder()
    limited = {"max_epochs": 3, "limit_train_batches": batches}
    trainer(callbacks=[Saving()], **limited).fit(whole, loader())
    trainer(**limited).fit(rest, loader(), ckpt_path=tmp_path / "saved", weights_only=False)
    assert len(whole.seen) == 3 * batches
    assert rest.seen == whole.seen[at[0] * batches + at[1] + 1 :]


class Own(IterableDataset):  # type: ignore[type-arg]
    """Without a length, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.at %= 40
        while self.at < 40:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


class Shards(ShardedIterableDataset):
    def read_shard(self, number: int, start: int) -> Iterator[int]:
        return iter(range(number * 10 + start, number * 10 + 10))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Own, Stream, lambda: Shards(4)])
def test_a_batch_that_lightning_holds_is_not_lost(OurLoader: Any, tmp_path: Path, make: Any, workers: int) -> None:
    """Of data without a length it reads a batch ahead of training, also of a map-style dataset that is read with it."""

    class Recorder(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen = Counter[tuple[str, int]]()
            self.until: int | None = None

        def on_train_batch_end(self, _outputs: Any, _batch: Any, number: int) -> None:
            if number == self.until:
                self.trainer.save_checkpoint(tmp_path / "saved")
                raise KeyboardInterrupt

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            self.seen.update((name, index) for name in batch for index in batch[name].tolist())
            return self.weight * batch["a"].float().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loaders() -> Any:
        return {
            "a": OurLoader(make(), batch_size=4, num_workers=workers),
            "b": OurLoader(range(80), batch_size=4, num_workers=workers),
        }

    seen = Counter[tuple[str, int]]()
    for until, saved in ((3, None), (5, tmp_path / "saved"), (None, tmp_path / "saved")):
        model = Recorder()
        model.until = until
        with suppress(KeyboardInterrupt, SystemExit):
            trainer(max_epochs=1).fit(model, lightning.utilities.CombinedLoader(loaders(), "min_size"), ckpt_path=saved)
        seen += model.seen
    times = 1 if isinstance(make(), Shards) else max(1, workers)  # each worker reads all of it
    assert seen == Counter({("a", index): times for index in range(40)} | {("b", i): 1 for i in range(40 * times)})
