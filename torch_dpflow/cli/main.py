"""The root of the command line. It imports a command only when the command is called."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from torch_dpflow._version import __version__
from torch_dpflow.errors import DPFlowError

#: Exit status after Control-C, as shells use it.
INTERRUPTED = 130
#: name → (module, attribute, description). A command is imported when it runs or prints its help.
COMMANDS = {
    "up": ("torch_dpflow.cli.up", "up", "Run a cluster that several jobs read from."),
    "down": ("torch_dpflow.cli.cluster", "down", "End a cluster."),
    "node": ("torch_dpflow.cli.up", "node", "Run workers of another host's cluster on this host."),
    "status": ("torch_dpflow.cli.cluster", "status", "List the flows, jobs and processes of a cluster."),
    "top": ("torch_dpflow.cli.cluster", "top", "Show the activity of a cluster, updated continually."),
    "flow": ("torch_dpflow.cli.cluster", "flow", "List, show, scale and delete flows."),
    "keygen": ("torch_dpflow.cli.cluster", "keygen", "Generate the keys of a cluster."),
    "check": ("torch_dpflow.cli.platform", "check", "Check a platform that runs workers."),
    "workers": ("torch_dpflow.cli.platform", "workers", "List the workers that a platform runs."),
    "sweep": (
        "torch_dpflow.cli.platform",
        "sweep",
        "End workers that a killed process has left on a platform.",
    ),
    "deploy": (
        "torch_dpflow.cli.deploy",
        "deploy",
        "Create or remove a cloud function for workers, or cluster nodes in a cloud.",
    ),
    "image": (
        "torch_dpflow.cli.image",
        "image",
        "Write the files from which a container image of workers is built.",
    ),
    "manifest": ("torch_dpflow.cli.deploy", "manifest", "Print the Kubernetes objects of a cluster."),
    "pool": ("torch_dpflow.cli.pool", "pool", "Hold datasets in this host's memory for all jobs that read them."),
    "cache": ("torch_dpflow.cli.cache", "cache", "Show or clear the disk cache of samples."),
    "dataset": (
        "torch_dpflow.cli.dataset",
        "dataset",
        "Import, list, show, verify, extend, copy and delete datasets.",
    ),
}


class LazyGroup(click.Group):
    """Group of commands that are imported on demand. Prints errors of the library and of files without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        close = " or ".join(map(repr, difflib.get_close_matches(name, COMMANDS)))
        hint = f"Did you mean {close}?" if close else f"There are {', '.join(sorted(COMMANDS))}."
        raise click.UsageError(f"No such command {name!r}. {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][2]) for name in sorted(COMMANDS)])

    def make_context(self, *given: Any, **options: Any) -> click.Context:
        with _ended_by_control_c():
            return super().make_context(*given, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _ended_by_control_c():  # also while a command's module is imported
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DPFlowError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                if error.filename is None:
                    raise
                raise click.ClickException(f"{os.fsdecode(error.filename)}: {error.strerror}") from error
            # Otherwise the interpreter would try to write the rest again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise click.ClickException(f"{error.strerror}: free space, or write the output elsewhere") from error


@contextmanager
def _ended_by_control_c() -> Iterator[None]:
    """Exit with the status of an interrupt if Control-C ends the body; click would use status 1."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Aborted!", err=True)
        sys.exit(INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dpflow")
def root() -> None:
    """Load data for PyTorch on elastic workers."""
