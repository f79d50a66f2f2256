"""`dpflow simulate`: the simulator of samplers and caches, which lives beside the library in its repository."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

import torch_dpflow


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Say what a cache of so many bytes gives jobs that share a dataset; `--help` lists the arguments."""
    repository = Path(torch_dpflow.__file__).parents[1]
    if not (repository / "benchmarks" / "simulation").is_dir():
        raise click.ClickException(
            "the simulator is not part of the installed package: clone the repository, install it from there "
            "(make .venv/.installed), and run `dpflow simulate` of that environment"
        )
    sys.path.insert(0, str(repository))
    main = importlib.import_module("benchmarks.simulation.cli").main
    raise SystemExit(main(list(arguments)))
