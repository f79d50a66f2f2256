"""Train a task whose data comes through a flow: the common part of three examples.

The data is generated once and stored in a dataset store, as bytes with annotations. A flow decodes and augments it.
`open_loaders` decides which loader feeds the training; everything else is the same for all of them. The reader's seed
decides what random stages draw for a sample of an epoch. So torch's loader and ours deliver the same batches, bit for
bit, and give the same losses.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from examples.option_values import address, not_negative, positive, rate, require_answer, seed
from examples.stopwatch import Stopwatch
from examples.train_classifier import seed_everything
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.errors import DatasetNotFoundError
from torch_dpflow.flows import (
    DataLoadFlow,
    DataLoadFlowRead,
    LocalDataLoadFlowReader,
    RemoteDataLoadFlowReader,
)

Loader = Any  # torch's DataLoader, or ours: the loop treats them alike
LOADERS = ("torch", "dpflow")
VARIANTS = ("train", "val")
#: How many samples of each variant there are.
Counts = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data, model and loss of an example."""

    title: str
    #: Of the stored dataset, "namespace/name".
    dataset: str
    #: (variant, count): samples as bytes and annotations, the same at every call.
    generate: Callable[[str, int], Iterable[tuple[bytes, Mapping[str, Any]]]]
    #: Adds the stages for a variant to a flow that has its dataset.
    describe: Callable[[DataLoadFlow, str], DataLoadFlow]
    #: None: torch's default.
    collate: Callable[[list[Any]], Any] | None
    model: Callable[[], nn.Module]
    #: The mean loss of a batch.
    loss: Callable[[nn.Module, Any], torch.Tensor]
    #: Figures over the batches of the validation, by name.
    evaluate: Callable[[nn.Module, Iterable[Any]], dict[str, float]]
    #: Of the command line.
    defaults: Mapping[str, Any]


def version_of(counts: Counts) -> str:
    """The stored version that holds so many samples."""
    return "v1-" + "-".join(str(counts[variant]) for variant in VARIANTS)


def publish(store: DatasetStore, task: Task, counts: Counts) -> None:
    """Generate the task's data into the store, unless it is there."""
    version = version_of(counts)
    try:
        store.load(task.dataset, version)
        return
    except DatasetNotFoundError:
        print(f"generating {task.dataset}:{version}")
    draft = Draft(store, task.dataset, version)
    for variant in VARIANTS:
        draft.add(variant, IterableImporter(task.generate(variant, counts[variant]), name=variant))
    draft.publish()


def flow_of(task: Task, variant: str, counts: Counts) -> DataLoadFlow:
    """The flow that a variant is read through; its name is another one where its data is."""
    flow = DataLoadFlow(f"{task.dataset}-{variant}-{counts[variant]}", 1)
    return task.describe(flow.dataset(task.dataset, version_of(counts), variant), variant)


def open_loaders(
    options: argparse.Namespace, task: Task, train: DataLoadFlowRead, val: DataLoadFlowRead
) -> tuple[Loader, Loader]:
    """Make the loaders of both reads with the chosen class; only the training is shuffled."""
    loaders = []
    for read, shuffle in ((train, True), (val, False)):
        given = {"shuffle": shuffle, "collate_fn": task.collate, "num_workers": options.workers}
        given["generator"] = torch.Generator().manual_seed(options.seed)
        if options.loader == "torch":
            loaders.append(DataLoader(read.to_mapped(), options.batch_size, **given))
        else:
            loaders.append(read.to_shuffled(options.batch_size, **given))
    return loaders[0], loaders[1]


class FlowTraining:
    """One run of a task."""

    def __init__(self, options: argparse.Namespace, task: Task, train: Loader, val: Loader) -> None:
        self._options, self._task, self._train, self._val = options, task, train, val
        self._model = task.model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), options.lr)
        steps = options.epochs * len(train)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, options.lr, total_steps=steps)
        self._steps = 0
        #: One entry of figures for each epoch.
        self.history: list[dict[str, float]] = []
        #: The loss of each step.
        self.losses: list[float] = []

    def run(self) -> None:
        """Train all epochs, or until --max-steps are done."""
        while len(self.history) < self._options.epochs and not self._out_of_steps():
            self._set_epoch(len(self.history))
            figures = self._train_epoch() | self._evaluate()
            self.history.append(figures)
            told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"epoch {len(self.history)}: {told}")

    def _set_epoch(self, epoch: int) -> None:
        """Set the epoch of random stages; on a cluster the services do this."""
        set_epoch = getattr(self._train.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def _train_epoch(self) -> dict[str, float]:
        self._model.train()
        begun, samples = len(self.losses), 0
        watch = Stopwatch(self._train)
        title = f"epoch {len(self.history) + 1}/{self._options.epochs}"
        with tqdm(desc=title, total=len(self._train), unit="batch", disable=self._options.quiet, leave=False) as bar:
            for batch in watch:
                self._step(batch)
                samples += len(batch[0])
                bar.set_postfix(
                    loss=f"{self.losses[-1]:.3f}",
                    samples_per_s=f"{samples / watch.elapsed_s:.1f}",
                    stall=f"{watch.stall_share:.0%}",
                    refresh=False,
                )
                bar.update()
                if self._out_of_steps():
                    break
        watch.stop()
        losses = self.losses[begun:]
        return {
            "loss": sum(losses) / len(losses),
            "samples_per_s": samples / watch.elapsed_s,
            "stall_share": watch.stall_share,
        }

    def _step(self, batch: Any) -> None:
        loss = self._task.loss(self._model, batch)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 5.0)
        self._optimizer.step()
        self._schedule.step()
        self._steps += 1
        self.losses.append(loss.item())

    @torch.inference_mode()
    def _evaluate(self) -> dict[str, float]:
        self._model.eval()
        return self._task.evaluate(self._model, self._val)

    def _out_of_steps(self) -> bool:
        return self._options.max_steps is not None and self._steps >= self._options.max_steps


def build_parser(task: Task, module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=task.title,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--loader", choices=LOADERS, default="dpflow")
    add(
        "--address",
        type=address,
        help="of a cluster that loads for all jobs: a connection file, or auto (dpflow only)",
    )
    add("--store", default="demo_data/datasets", help="dataset store: a folder or a URL")
    add("--train", type=positive, default=400, help="samples to train on")
    add("--val", type=positive, default=100, help="samples to validate with")
    add("--epochs", type=positive, default=5)
    add("--batch-size", type=positive, default=16)
    add("--workers", type=not_negative, default=2, help="0 loads in the training process")
    add("--lr", type=rate, default=1e-3, help="highest of the one-cycle schedule")
    add("--seed", type=seed, default=0)
    add("--threads", type=positive, default=1, help="of torch in the training process")
    add("--max-steps", type=positive, help="stop after so many")
    add("--summary-json", type=Path, help="file for the figures of the run")
    add("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(**task.defaults)
    return parser


def prepare(options: argparse.Namespace, task: Task) -> FlowTraining:
    """Data, flows, loaders and model."""
    counts = {"train": options.train, "val": options.val}
    store = DatasetStore.create(options.store)
    publish(store, task, counts)
    reader: Any = LocalDataLoadFlowReader(store, seed=options.seed)
    if options.address is not None:
        reader = RemoteDataLoadFlowReader(
            store, address=options.address, workers=max(1, options.workers), seed=options.seed
        )
    flows = [flow_of(task, variant, counts) for variant in VARIANTS]
    print(f"train flow: {flows[0].format()}")
    train, val = (flow.prepare_read(reader) for flow in flows)
    return FlowTraining(options, task, *open_loaders(options, task, train, val))


def main(task: Task, module: str, arguments: Sequence[str] | None = None) -> int:
    parser = build_parser(task, module)
    options = parser.parse_args(arguments)
    if options.address is not None and options.loader != "dpflow":
        parser.error(f"--address is for --loader dpflow, not {options.loader}")
    require_answer(parser, options.address)
    torch.set_num_threads(options.threads)
    seed_everything(options.seed)
    begun = time.monotonic()
    training = prepare(options, task)
    try:
        training.run()
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    print(f"{time.monotonic() - begun:.0f} s with the {options.loader} loader")
    if options.summary_json is not None:
        summary = {"loader": options.loader, "epochs": training.history, "losses": training.losses}
        options.summary_json.write_text(json.dumps(summary, indent=2), encoding="utf-8")
    return 0
