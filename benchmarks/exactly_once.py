"""Is each sample read exactly once in an epoch in which a worker is killed? Ours beside tf.data service, as counted.

    python -m benchmarks.exactly_once [--json] [--epochs 20] [--side NAME+...] [--quick]

Two workers; in the middle of every epoch one of them gets SIGKILL, and another takes its place. What the sides are is
told in benchmarks/README.md. tf.data service needs tensorflow-cpu; without it, the command that installs it is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.exactly_once_sides import BATCH, SIDES, Side
from benchmarks.report import facts


@dataclass(frozen=True, kw_only=True)
class Visits:
    """How often the samples of an epoch came."""

    #: Samples that never came.
    lost: int
    #: Deliveries beyond the first of each sample.
    repeated: int


def count(read: Iterable[int], samples: int) -> Visits:
    """What came, of samples 0 to `samples` - 1. Raises ValueError for one that there is not."""
    came = Counter(read)
    if unknown := came.keys() - set(range(samples)):
        raise ValueError(f"samples {sorted(unknown)[:5]} came, and there are {samples}")
    return Visits(lost=samples - len(came), repeated=came.total() - len(came))


def epoch_with_a_kill(side: Side, samples: int) -> Visits:
    """Read an epoch, and kill a worker once half of its batches came."""
    batches = iter(side.read())
    read = list(itertools.chain.from_iterable(itertools.islice(batches, samples // BATCH // 2)))
    side.kill()
    read += itertools.chain.from_iterable(batches)
    side.settle()
    return count(read, samples)


def measure(name: str, samples: int, epochs: int) -> list[Visits]:
    """All epochs of a side."""
    visits = []
    with SIDES[name][0](samples) as side:
        for epoch in range(epochs):
            print(f"{name}: epoch {epoch + 1}/{epochs}", file=sys.stderr, flush=True)
            visits.append(epoch_with_a_kill(side, samples))
    return visits


HEADINGS = ("side", "lost", "repeated", "epochs with neither", "lost in an epoch", "repeated in an epoch")


def row(name: str, visits: Sequence[Visits]) -> list[str]:
    """Of the table: all epochs together, then medians of an epoch with their range."""
    lost, repeated = [one.lost for one in visits], [one.repeated for one in visits]
    exact = sum(one == Visits(lost=0, repeated=0) for one in visits)
    spans = [f"{statistics.median(kind):g} ({min(kind)}-{max(kind)})" for kind in (lost, repeated)]
    return [name, f"{sum(lost):,}", f"{sum(repeated):,}", f"{exact} of {len(visits)}", *spans]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The same table for a README."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *rows)]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], title: str) -> Table:
    """For a terminal."""
    shown = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "side" else "right")
    for cells in rows:
        shown.add_row(*cells)
    return shown


def absent(name: str) -> bool:
    """Whether what a side needs is not installed."""
    package = SIDES[name][1]
    return importlib.util.find_spec(package) is None


def chosen(text: str) -> list[str]:
    names = text.split("+")
    for name in names:
        if name not in SIDES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SIDES)}")
    return names


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactly_once", description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add(
        "--side",
        type=chosen,
        default=list(SIDES),
        help="e.g. 'dpflow, shared flow' (default: all); + between them",
    )
    add("--epochs", type=int, default=20, help="of each side (default: %(default)s)")
    add("--samples", type=int, default=512, help="of an epoch (default: %(default)s)")
    add("--quick", action="store_true", help="two epochs, to see that it runs")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object a line")
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    arguments = parser.parse_args(given)
    epochs = 2 if arguments.quick else arguments.epochs
    if epochs < 1 or arguments.samples < 4 * BATCH:
        parser.error(f"--epochs {epochs}, --samples {arguments.samples}: at least 1 and {4 * BATCH} are needed")
    here = [name for name in arguments.side if not absent(name)]
    results = {name: measure(name, arguments.samples, epochs) for name in here}
    rows = [row(name, visits) for name, visits in results.items()]
    if arguments.json:
        for name, visits in results.items():
            print(json.dumps({"side": name, "epochs": [asdict(one) for one in visits], "machine": facts()}))
    elif arguments.markdown:
        print(markdown(rows))
    else:
        title = f"{arguments.samples} samples an epoch, 2 workers, one killed in the middle of each"
        Console(width=160).print(table(rows, title))
    for name in arguments.side:
        if name not in here:
            print(f"{name}: not installed; pip install tensorflow-cpu", file=sys.stderr)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # here: a test that calls `main` keeps its environment
    main()
