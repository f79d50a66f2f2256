"""`dpflow deploy`: makes what a platform needs before it can run workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from torch_dpflow.platforms.registry import resolve

if TYPE_CHECKING:
    from torch_dpflow.platforms.aws_lambda import Lambda
    from torch_dpflow.platforms.fc import FunctionCompute


@click.group()
def deploy() -> None:
    """Make, change or remove the function that a platform's workers are, with the settings of dpflow.toml."""


@deploy.command()
@click.option("--image", default="", help="The container's image, in a registry of the function's region.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--remove", "removes", is_flag=True, help="Remove the function.")
def fc(image: str, dry_run: bool, removes: bool) -> None:
    """The function of platform="fc", by [platform.fc]: region, function, cpu, memory, lifetime, role, vpc."""
    from torch_dpflow.platforms import fc_deploy

    settings: FunctionCompute = resolve("fc")  # type: ignore[assignment]
    if removes:
        lines = fc_deploy.remove(settings, dry_run=dry_run)
    else:
        lines = fc_deploy.deploy(settings, image, dry_run=dry_run)
    for line in lines:
        click.echo(line)


@deploy.command("lambda")
@click.option(
    "--image", default="", help="The container's image, in a registry (ECR) of the function's region."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--remove", "removes", is_flag=True, help="Remove the function.")
def lambda_(image: str, dry_run: bool, removes: bool) -> None:
    """The function of platform="lambda", by [platform.lambda]: region, function, memory, lifetime, role, vpc."""
    from torch_dpflow.platforms import lambda_deploy

    settings: Lambda = resolve("lambda")  # type: ignore[assignment]
    if removes:
        lines = lambda_deploy.remove(settings, dry_run=dry_run)
    else:
        lines = lambda_deploy.deploy(settings, image, dry_run=dry_run)
    for line in lines:
        click.echo(line)
