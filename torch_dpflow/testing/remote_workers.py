"""What the workers in `torch_dpflow.testing.launchers` run: apart, so that it imports no torch or pytest.

Platforms that start a command run it as `python -m`, others call `run`.
"""

from __future__ import annotations

import json
import socket
import sys

from torch_dpflow.remote.launchers.processes import take_launch_spec

#: What a worker writes before it leaves, and its exit code.
LAST_WORDS, CODE = "the cupboard is bare", 7


def run(launch_spec: bytes) -> None:
    """Send the launch spec to the address in it, and run until that hangs up; with "leave" in it end at once."""
    told = json.loads(launch_spec)
    if told.get("leave"):
        print(LAST_WORDS, file=sys.stderr)
        sys.exit(CODE)
    with socket.create_connection(tuple(told["address"])) as connection:
        connection.sendall(len(launch_spec).to_bytes(4, "big") + launch_spec)
        connection.recv(1)


if __name__ == "__main__":
    run(take_launch_spec(*sys.argv[1:2]))
