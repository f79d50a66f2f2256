"""`dpflow dataset`: import, list, show, verify and extend datasets."""

from __future__ import annotations

import click


@click.group()
def dataset() -> None:
    """Keep datasets by name, on any storage."""
