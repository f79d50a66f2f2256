"""The demonstration: five acts, each with torch's loader and with ours, one table and one picture.

    python -m examples.demo        (`make demo` sets everything up first)

Generates 480 JPEGs once. Then a small network trains on random crops of them: the loaders swapped; with a faster
decoder; three trials at once; with a worker that is killed; resumed by another number of ranks. The acts take less than
two minutes on two cores.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples import natural_images
from examples.bar_picture import BLUE, RED, Bar, bar_picture
from examples.cluster import processes, started
from examples.demo_acts import (
    BATCH_SIZE,
    KILLED_AT,
    OURS,
    RANKS,
    RANKS_AFTER,
    TORCH,
    WORKERS,
    Played,
    decode,
    killed,
    partials,
    play,
    resized,
    start,
    swap,
    tree_cpu_s,
    trial,
)
from examples.option_values import positive

CLASSES = 4
TRIALS = 3
#: An epoch of so many images has more batches than are read before it is interrupted.
MIN_TRAIN = BATCH_SIZE * (KILLED_AT + 1)
#: What the acts take at most on two cores that do nothing else, seconds.
EXPECTED_S = 120.0
#: Below this share of the processors, other work has the rest.
FREE_SHARE = 0.6
NEXT = """Try next:
  README.md                    the one import to change in your own script
  loader.explain()             what limits it, and what to change
  docs/howto/torchvision.md    decoding by torch_dpflow.vision
  docs/howto/sharing.md        `dpflow up`, then flow= in jobs that read the same data
  docs/howto/resize.md         checkpoints that another number of ranks continues"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    act: str
    torch: str
    ours: str
    gain: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the acts read."""

    data: Path
    train: int
    epochs: int


def times(ours: Played, torchs: Played) -> str:
    """Compare images a second, and the processor time of an image, which other work on the machine does not change."""
    return f"{ours.rate / torchs.rate:.1f} times the images, {ours.cpu_ms / torchs.cpu_ms:.2f} of the processor time"


def rate(played: Played) -> str:
    return f"{played.rate:,.0f} images/s"


class Demonstration:
    """Plays the acts one after the other."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console, self._options = console, options
        self.rows: list[Row] = []
        #: The images a second of each side.
        self.bars: list[Bar] = []

    def run(self) -> None:
        acts: list[tuple[str, Callable[[], Row]]] = [
            ("the swap: the same training with either loader", self.swap),
            ("loading-bound: torch with Pillow, ours with torch_dpflow.vision", self.decode),
            (f"{TRIALS} trials at once: a loader for each, and one flow for all", self.trials),
            (f"a worker is killed after batch {KILLED_AT}", self.killed),
            (f"an epoch begun by {RANKS} ranks is continued by {RANKS_AFTER}", self.resized),
        ]
        for number, (title, act) in enumerate(acts, 1):
            self._console.print(f"{number} of {len(acts)}  {title} ...")
            row = act()
            self.rows.append(row)
            self._console.print(f"        torch: {row.torch}; ours: {row.ours}; {row.gain}", highlight=False)

    def _both(self, function: Callable[..., Played], *given: object) -> tuple[Played, Played]:
        sides = partials(function, *given)
        return play([sides[TORCH]]), play([sides[OURS]])

    def swap(self) -> Row:
        torchs, ours = self._both(swap, self._options.data, self._options.epochs)
        same = torchs.digest == ours.digest and torchs.loss == ours.loss
        return Row(
            act="the swap",
            torch=f"batches {torchs.digest}, loss {torchs.loss:.4f}",
            ours=f"batches {ours.digest}, loss {ours.loss:.4f}",
            gain="the same batches and loss, bit for bit" if same else "THEY DIFFER",
        )

    def decode(self) -> Row:
        torchs, ours = self._both(decode, self._options.data, 2 * self._options.epochs)
        self.bars += [_bar("torch, Pillow", RED, torchs), _bar("torch_dpflow, vision", BLUE, ours)]
        return Row(act="loading-bound", torch=rate(torchs), ours=rate(ours), gain=times(ours, torchs))

    def trials(self) -> Row:
        given = (self._options.data, self._options.epochs)
        sides = [partials(trial, *given, number, "") for number in range(TRIALS)]
        torchs = play([one[TORCH] for one in sides])
        with started() as address:
            # Its workers import torchvision once, which torch's have by their fork.
            play([partial(start, self._options.data, address)])
            around = [view.pid for view in processes(address) if view.pid and view.role == "node"]
            sides = [partials(trial, *given, number, address) for number in range(TRIALS)]
            ours = play([one[OURS] for one in sides], around=around)
        self.bars += [
            _bar(f"{TRIALS} trials: torch", RED, torchs),
            _bar(f"{TRIALS} trials: torch_dpflow, one flow", BLUE, ours),
        ]
        return Row(act=f"{TRIALS} trials at once", torch=rate(torchs), ours=rate(ours), gain=times(ours, torchs))

    def killed(self) -> Row:
        # A worker that is killed leaves its temporary directory.
        with tempfile.TemporaryDirectory(prefix="demo-") as tempfile.tempdir:
            torchs, ours = self._both(killed, self._options.data, True)
        tempfile.tempdir = None
        undisturbed = play([partials(killed, self._options.data, False)[OURS]])
        same = ours.digest == undisturbed.digest and not ours.error
        return Row(
            act="a worker is killed",
            torch=f"{torchs.batches} of {undisturbed.batches} batches, then {torchs.error.partition(':')[0]}",
            ours=f"{ours.batches} of {undisturbed.batches} batches",
            gain="the batches of an undisturbed epoch" if same else "THEY DIFFER",
        )

    def resized(self) -> Row:
        torchs, ours = self._both(resized, self._options.data)
        return Row(
            act=f"{RANKS} ranks, then {RANKS_AFTER}",
            torch=f"begins again: {torchs.repeated} images read twice, {torchs.lost} lost",
            ours=f"goes on: {ours.repeated} read twice, {ours.lost} lost",
            gain="each image once in the epoch",
        )

    def table(self) -> Table:
        """The table that the demonstration ends with."""
        table = Table(title="torch's DataLoader and torch_dpflow")
        for heading in ("act", "torch", "torch_dpflow", "what changes"):
            table.add_column(heading)
        for row in self.rows:
            table.add_row(row.act, row.torch, row.ours, row.gain)
        return table

    def picture(self) -> str:
        """The picture of the acts that have a rate, with a line for each of the others."""
        lines = [f"{row.act}: torch {row.torch}; torch_dpflow {row.ours}" for row in self.rows[3:]]
        return bar_picture("Images a second, on this machine", self.bars, lines)


def _bar(label: str, colour: str, played: Played) -> Bar:
    return Bar(label, [(colour, played.rate)], f"{played.rate:,.0f}")


def speed(seconds: float, cpu_s: float) -> str:
    """Say how long the acts took, and what to believe where a machine is slow or busy."""
    cores = len(os.sched_getaffinity(0))
    said = f"The acts took {seconds:.0f} s, and {cpu_s:.0f} s of processor time."
    if cpu_s < FREE_SHARE * seconds * min(cores, 2):
        said += " Other work had a part of the processors: believe the ratios of processor time, not of images/s."
    elif seconds > EXPECTED_S:
        said += f" This machine is slow: two cores without other work take less than {EXPECTED_S:.0f} s."
    return said


def run(console: Console, options: Options, images: natural_images.Specification, drawn: Path) -> None:
    console.print(f"the images: {images.train + images.val} JPEGs in {options.data} ...")
    if not natural_images.generate(options.data, images):
        console.print("        they are there already")
    demonstration = Demonstration(console, options)
    begun, cpu_before = time.monotonic(), tree_cpu_s(os.getpid())
    demonstration.run()
    seconds, cpu_s = time.monotonic() - begun, tree_cpu_s(os.getpid()) - cpu_before
    drawn.write_text(demonstration.picture(), encoding="utf-8")
    console.print(demonstration.table())
    console.print(
        f"{speed(seconds, cpu_s)} Each job has {WORKERS} workers, and batches of {BATCH_SIZE}. See {drawn}.\n",
        highlight=False,
    )
    console.print(NEXT, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("demo_data/images"), help="folder for the images")
    parser.add_argument("--picture", type=Path, default=Path("demo.svg"), help="file for the picture")
    parser.add_argument("--train", type=positive, default=400, help="images to train on")
    parser.add_argument("--val", type=positive, default=80, help="images to validate with, for other examples")
    parser.add_argument("--epochs", type=positive, default=3)
    options = parser.parse_args(arguments)
    if options.train < MIN_TRAIN:
        parser.error(f"--train {options.train}: must be at least {MIN_TRAIN}, for an epoch that can be interrupted")
    console = Console()
    try:
        images = natural_images.Specification(classes=CLASSES, train=options.train, val=options.val)
        given = Options(data=options.data.absolute(), train=options.train, epochs=options.epochs)
        run(console, given, images, options.picture)
    except KeyboardInterrupt:
        shutil.rmtree(natural_images.partial_directory(options.data), ignore_errors=True)
        console.print("interrupted: nothing is left behind but finished images")
        return 130
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
