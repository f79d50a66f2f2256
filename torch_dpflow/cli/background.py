"""A command that goes on in the background, once it has announced that it is up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import click

#: Ends an announcement: processes that the command starts may hold its pipe open.
_END = b"\0"
#: Most characters of a log that an error shows.
_MAX_TAIL = 2000


def go_on_in_background(log: Path) -> Callable[[str], None]:
    """Fork. The child returns and writes its output to `log`; the parent prints what it announces, and exits.

    Returns:
        Sends the announcement, once.

    Raises, in the parent:
        click.ClickException: the child ended before it announced anything.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    begins_at = os.fstat(output).st_size
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        os.close(writer)
        os.close(output)
        _print_announced(reader, child, log, begins_at)
        sys.exit(0)
    os.close(reader)
    os.setsid()  # neither Control-C nor the terminal's end is for it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)

    def announce(text: str) -> None:
        os.write(writer, text.encode() + _END)
        os.close(writer)

    return announce


def _print_announced(reader: int, child: int, log: Path, begins_at: int) -> None:
    found = b""
    try:
        with open(reader, "rb", buffering=0) as pipe:
            while not found.endswith(_END) and (part := pipe.read(4096)):
                found += part
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    if not found.endswith(_END):
        with open(log, "rb") as file:
            file.seek(begins_at)
            said = file.read().decode(errors="replace")[-_MAX_TAIL:].strip()
        raise click.ClickException(f"the cluster has not started; {log} says:\n{said}")
    click.echo(found.removesuffix(_END).decode())
