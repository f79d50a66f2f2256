"""The training loop of `train_classifier`: steps, validation, checkpoints, and going on from one."""

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import nn
from torchvision import models
from tqdm import tqdm

from examples import checkpoint
from examples.stopwatch import Stopwatch

Loader = Any  # torch's DataLoader, or ours: the loop treats them alike


def build_schedule(
    options: argparse.Namespace, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    if options.lr_scheduler == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, options.lr_step_size, options.lr_gamma)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)


class Training:
    """One run: what it trains, on what, and how far it has come."""

    def __init__(
        self, options: argparse.Namespace, train_loader: Loader, val_loader: Loader, classes: list[str]
    ) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.train_loader, self.val_loader, self.classes = train_loader, val_loader, classes
        self.model = models.get_model(options.arch, num_classes=len(classes)).to(self.device)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay
        )
        self.schedule = build_schedule(options, self.optimizer)
        #: training steps of all epochs
        self.steps = 0
        #: epochs that are done, and batches of the present one
        self.epoch = self.batch = 0
        #: of the present epoch
        self.loss_sum, self.samples = 0.0, 0
        #: one entry of figures for each epoch that is done
        self.history: list[dict[str, Any]] = []
        self._rng_after_start: dict[str, Any] | None = None

    def run(self) -> None:
        """Train to the end of the last epoch, or until --max-steps are done."""
        while self.epoch < self.options.epochs and not self._out_of_steps():
            figures = self._train_epoch()
            if self.batch == len(self.train_loader):
                self._close_epoch(figures | self._evaluate())
        if self.epoch < self.options.epochs:
            print(f"stopped after {self.steps} steps")

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint; raise CheckpointError if it is of another run."""
        state = checkpoint.load(path, self.device, self._identity())
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.steps, self.history = state["steps"], state["history"]
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.loss_sum, self.samples = state["loss_sum"], state["samples"]
        positioned = state["loader"] is not None and hasattr(self.train_loader, "load_state_dict")
        if positioned:
            self.train_loader.load_state_dict(state["loader"])
        if self.batch > 0 and positioned:
            # Once the loader has started, not before: a start draws from the generators, and the run that
            # was interrupted had done so already.
            self._rng_after_start = state["rng"]
            return
        checkpoint.restore_rng_states(state["rng"])
        if self.batch > 0:
            print(
                f"the {self.options.loader} loader cannot go on after batch {self.batch} of epoch "
                f"{self.epoch + 1}: the rest of it is left out, epoch {self.epoch + 2} comes next"
            )
            with warnings.catch_warnings():
                # This process has made no step yet, but the one that wrote the checkpoint had.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self._next_epoch()

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run, as plain data."""
        totals = {key: sum(figures[key] for figures in self.history) for key in ("seconds", "stall_s", "trained")}
        stats = self.train_loader.stats() if hasattr(self.train_loader, "stats") else None
        return {
            "loader": self.options.loader,
            "steps": self.steps,
            "samples_per_s": totals["trained"] / max(totals["seconds"], 1e-9),
            "stall_share": totals["stall_s"] / max(totals["seconds"], 1e-9),
            "time_to_first_batch_s": self.history[0]["time_to_first_batch_s"] if self.history else None,
            "accuracy": self.history[-1]["accuracy"] if self.history else None,
            "epochs": self.history,
            "loader_stats": None if stats is None else {**dataclasses.asdict(stats), "times": stats.times.stages},
        }

    def _train_epoch(self) -> dict[str, Any]:
        """Train on what is left of the present epoch, --max-steps allowing; return its figures."""
        self.model.train()
        trained_before = self.samples
        watch = Stopwatch(self.train_loader)
        if self._rng_after_start is not None:
            checkpoint.restore_rng_states(self._rng_after_start)
            self._rng_after_start = None
        with self._bar(f"epoch {self.epoch + 1}/{self.options.epochs}", len(self.train_loader), self.batch) as bar:
            for images, targets in watch:
                self._step(images, targets)
                bar.set_postfix(
                    loss=f"{self.loss_sum / self.samples:.3f}",
                    samples_per_s=f"{(self.samples - trained_before) / watch.elapsed_s:.1f}",
                    stall=f"{watch.stall_share:.0%}",
                    refresh=False,
                )
                bar.update()
                if self._checkpoint_due():
                    self._save()
                if self._out_of_steps():
                    break
        watch.stop()
        return self._figures(watch, self.samples - trained_before)

    def _step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        images, targets = (
            images.to(self.device, non_blocking=True),
            targets.to(self.device, non_blocking=True),
        )
        loss = self.criterion(self.model(images), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss_sum += loss.item() * len(targets)
        self.samples += len(targets)
        self.batch += 1
        self.steps += 1

    @torch.inference_mode()
    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        loss_sum, correct, samples = 0.0, 0, 0
        with self._bar("validation", len(self.val_loader)) as bar:
            for images, targets in self.val_loader:
                targets = targets.to(self.device)
                scores = self.model(images.to(self.device))
                loss_sum += self.criterion(scores, targets).item() * len(targets)
                correct += int((scores.argmax(1) == targets).sum())
                samples += len(targets)
                bar.update()
        return {"val_loss": loss_sum / samples, "accuracy": correct / samples}

    def _figures(self, watch: Stopwatch[Any], trained: int) -> dict[str, Any]:
        return {
            "epoch": self.epoch + 1,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": self.loss_sum / max(self.samples, 1),
            "trained": trained,
            "seconds": watch.elapsed_s,
            "stall_s": watch.stall_s,
            "time_to_first_batch_s": watch.time_to_first_batch_s,
        }

    def _close_epoch(self, figures: dict[str, Any]) -> None:
        self.history.append(figures)
        self._next_epoch()
        self._save()
        print(
            f"epoch {figures['epoch']}: loss {figures['train_loss']:.4f}, validation loss "
            f"{figures['val_loss']:.4f}, accuracy {figures['accuracy']:.1%}, "
            f"{figures['trained'] / figures['seconds']:.1f} samples/s, "
            f"stall {figures['stall_s'] / figures['seconds']:.0%}"
        )

    def _next_epoch(self) -> None:
        self.schedule.step()
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum, self.samples = 0.0, 0

    def _save(self) -> None:
        if self.options.output is None:
            return
        position = self.train_loader.state_dict() if hasattr(self.train_loader, "state_dict") else None
        state = {
            "options": self._identity(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": position,
            "rng": checkpoint.rng_states(),
        }
        progress = ("steps", "epoch", "batch", "loss_sum", "samples", "history")
        path = self.options.output / "checkpoint.pth"
        checkpoint.save(path, state | {name: getattr(self, name) for name in progress})

    def _identity(self) -> dict[str, object]:
        names = ("arch", "image_size", "batch_size", "limit_batches", "seed")
        return {name: getattr(self.options, name) for name in names} | {"classes": self.classes}

    def _checkpoint_due(self) -> bool:
        if self.batch == len(self.train_loader):
            return False  # the end of the epoch writes one, after validation
        every = self.options.checkpoint_every
        return self._out_of_steps() or (every is not None and self.batch % every == 0)

    def _out_of_steps(self) -> bool:
        return self.options.max_steps is not None and self.steps >= self.options.max_steps

    def _bar(self, label: str, total: int, done: int = 0) -> "tqdm[Any]":
        return tqdm(desc=label, total=total, initial=done, unit="batch", disable=self.options.quiet, leave=False)
