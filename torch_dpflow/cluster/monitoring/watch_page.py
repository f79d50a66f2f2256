"""The process of a live page that shows the loaders of its parent: `python -m`, with a socket's number and a title.

Standard input has the page's place, then what is observed, as lines of JSON. It ends with its parent.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from torch_dpflow.cluster.monitoring.page_access import PagePlace
from torch_dpflow.cluster.monitoring.page_figures import Observation
from torch_dpflow.cluster.monitoring.page_history import PageHistory
from torch_dpflow.workers.process_control import exit_with


def main() -> None:
    """Serve until the parent ends, or closes the pipe."""
    from torch_dpflow.cluster.monitoring.page_server import PageServer  # needs an extra

    exit_with(os.getppid())
    number, title = sys.argv[1:]
    place = msgspec.json.decode(sys.stdin.buffer.readline(), type=PagePlace)
    page = PageServer(socket.socket(fileno=int(number)), place.guard, PageHistory("loader", title))
    page.start()
    decoder = msgspec.json.Decoder(Observation)
    for line in sys.stdin.buffer:
        page.observe(decoder.decode(line))
    os._exit(0)


if __name__ == "__main__":
    main()
