"""`dpflow check`, `workers` and `sweep`: platforms that run workers elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click

from torch_dpflow.errors import OptionError
from torch_dpflow.platforms.names import MemberName, prefix_of
from torch_dpflow.platforms.registry import resolve

if TYPE_CHECKING:
    from torch_dpflow.platforms.members import Adapter


@click.command()
@click.argument("platform")
@click.option("--listen", help="Where the worker is to call: tcp://ADDRESS:PORT, as LoaderOptions(listen=).")
def check(platform: str, listen: str | None) -> None:
    """Try PLATFORM, as "ray", with one worker: reachability, versions, room, round trip, bandwidth.

    Ends with status 0 if all is well, and 1 if not.
    """
    from torch_dpflow.loader.platform_check import check_platform

    good = True
    for finding in check_platform(platform, listen=listen):
        click.echo(f"{'ok   ' if finding.good else 'WRONG'} {finding.text}")
        good = good and finding.good
    sys.exit(0 if good else 1)


@click.command()
@click.argument("platform")
def workers(platform: str) -> None:
    """List the workers that PLATFORM runs, whoever has started them."""
    with _adapter(platform) as adapter:
        found = [*adapter.list("dpf-")]
    for name in sorted(found):
        click.echo(name)
    for cluster, count in sorted(Counter(MemberName.parse(name).cluster for name in found).items()):
        click.echo(f"{count} of cluster {cluster}", err=True)


@click.command()
@click.argument("platform")
@click.option("--cluster", help="Whose workers: the 8 digits after dpf- in their names.")
@click.option("--all", "everything", is_flag=True, help="End the workers of all, also of loaders that run.")
def sweep(platform: str, cluster: str | None, everything: bool) -> None:
    """End workers on PLATFORM that a killed process has left."""
    if (cluster is None) is not everything:
        raise OptionError("give either --cluster, as `dpflow workers` shows it, or --all")
    with _adapter(platform) as adapter:
        found = adapter.list("dpf-" if cluster is None else prefix_of(cluster))
        for name, ref in found.items():
            adapter.stop(name, ref)
    click.echo(f"{len(found)} ended")


@contextmanager
def _adapter(platform: str) -> Iterator[Adapter]:
    with closing(resolve(platform).adapter()) as adapter:
        yield adapter
