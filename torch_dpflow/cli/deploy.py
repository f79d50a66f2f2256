"""`dpflow deploy`: makes what a platform needs before it can run workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import click

from torch_dpflow.platforms.registry import resolve

_F = TypeVar("_F", bound=Callable[..., None])


@click.group()
def deploy() -> None:
    """Make, change or remove the function that a platform's workers are, with the settings of dpflow.toml."""


def _with_options(command: _F) -> _F:
    """What is given to the command of any platform."""
    for option in (
        click.option("--remove", "removes", is_flag=True, help="Remove the function."),
        click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
        click.option(
            "--image", default="", help="The container's image, in a registry of the function's region."
        ),
    ):
        command = option(command)
    return command


@deploy.command()
@_with_options
def fc(image: str, dry_run: bool, removes: bool) -> None:
    """The function of platform="fc", by [platform.fc]: region, function, cpu, memory, lifetime, role, vpc."""
    from torch_dpflow.platforms import fc_deploy

    _say("fc", fc_deploy.deploy, fc_deploy.remove, image, dry_run, removes)


@deploy.command("lambda")
@_with_options
def lambda_(image: str, dry_run: bool, removes: bool) -> None:
    """The function of platform="lambda", by [platform.lambda]: region, function, memory, lifetime, role, vpc."""
    from torch_dpflow.platforms import lambda_deploy

    _say("lambda", lambda_deploy.deploy, lambda_deploy.remove, image, dry_run, removes)


def _say(
    platform: str,
    make: Callable[..., Iterable[str]],
    remove: Callable[..., Iterable[str]],
    image: str,
    dry_run: bool,
    removes: bool,
) -> None:
    settings = resolve(platform)
    lines = remove(settings, dry_run=dry_run) if removes else make(settings, image, dry_run=dry_run)
    for line in lines:
        click.echo(line)
