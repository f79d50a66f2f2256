"""The simulator's options."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from benchmarks.simulation.contestants import DIRECTORY, POLICY_NAMES, SAMPLER_NAMES
from benchmarks.simulation.figures import FIGURES
from benchmarks.simulation.question import Question
from benchmarks.simulation.scenarios import SCENARIOS
from benchmarks.simulation.sizes import parse_capacity, parse_size

T = TypeVar("T")

#: figures that are judgements of uniformity
UNIFORMITY = ("5-4", "uniformity")
TARGETS = "targets"

_EXAMPLES = """\
what would a 64 GiB cache give my four trials?
  python -m benchmarks.simulate --samples 1281167 --sample-size 110kB --capacity 64GiB \\
      --starts 0,0.25,0.5,0.75 --speeds 1,0.8,0.6,0.4 --epochs 3 --plot answer.png
samplers x policies x capacities in named scenarios
  python -m benchmarks.simulate --scenario speed2,windows --capacity 5%,25% --sampler joader,dynagcs \\
      --policy refcnt,alsd
every figure that the project promises, with pass or fail
  python -m benchmarks.simulate --figure targets
uniformity as in the thesis: 10,000 epochs of 1,000 samples
  python -m benchmarks.simulate --figure uniformity --epochs 10000 --workers 2 --plot uniformity.png
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="Simulate jobs that share a data set: samplers x cache policies x capacities.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--figure", choices=[*FIGURES, *UNIFORMITY, TARGETS], help="reproduce a figure")
    add("--json", action="store_true", help="print one JSON object per line instead of a table")
    add("--plot", type=Path, metavar="FILE.png", help="draw the result")
    add("--seeds", type=_count, default=5, help="runs of each case (default: %(default)s)")
    add("--workers", type=_count, default=1, help="processes, for uniformity (default: %(default)s)")
    add("--epochs", type=_count, help="epochs of each job (for uniformity 10000 by default)")
    add("--sampler", type=_names(SAMPLER_NAMES), help=f"one or more of {', '.join(SAMPLER_NAMES)}")
    add("--scenario", type=_names(SCENARIOS), help=f"one or more of {', '.join(SCENARIOS)}")
    _add_question(made)
    return made


def _add_question(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("a question of your own").add_argument
    add("--policy", type=_names(POLICY_NAMES), help=f"one or more of {', '.join(POLICY_NAMES)}")
    add("--samples", type=_count, default=1_281_167, help="in the data set (default: %(default)s)")
    add("--sample-size", type=_checked(parse_size), default=110_000, help="of a cached sample, e.g. 110kB")
    capacities = _list(_checked(parse_capacity))
    add("--capacity", type=capacities, default="64GiB", help="of the cache, e.g. 16GiB,64GiB or 5%%,25%%")
    add("--jobs", type=_count, default=4, help="when no starts are given (default: %(default)s)")
    add("--starts", type=_list(float), help="of each job, in epochs of the fastest job")
    add("--speeds", type=_list(float), help="of each job, relative to each other")
    add("--batch-size", type=_count, default=256, help="(default: %(default)s)")
    add("--irregular", action="store_true", help="exponential instead of steady batch times")
    add("--independence", type=float, default=0.0, help="share of picks that ignore what is loaded")
    add("--simulated", type=_count, default=2000, help="samples simulated (default: %(default)s)")


def question(arguments: argparse.Namespace) -> Question:
    """The user's question. Raises ValueError for jobs that cannot be."""
    starts = arguments.starts or [0.0] * (len(arguments.speeds) if arguments.speeds else arguments.jobs)
    return Question(
        samples=arguments.samples,
        sample_size=arguments.sample_size,
        capacities=arguments.capacity,
        scenarios=arguments.scenario or (),
        starts=starts,
        speeds=arguments.speeds or [1.0] * len(starts),
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        timing="exponential" if arguments.irregular else "steady",
        samplers=arguments.sampler or ["shared-log", "independent"],
        policies=arguments.policy or [DIRECTORY],
        independence=arguments.independence,
        simulated=arguments.simulated,
    )


def _names(allowed: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: allowed are {', '.join(allowed)}")
        return names

    return parse


def _list(parse_one: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [parse_one(part) for part in text.split(",")]


def _checked(parse_one: Callable[[str], T]) -> Callable[[str], T]:
    """The same, its ValueError as one whose text argparse prints."""

    def parse(text: str) -> T:
        try:
            return parse_one(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _count(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return value
