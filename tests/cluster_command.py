"""`dpflow up` as a person runs it, apart from the test's process, with what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster

#: Leaves the test's process before it becomes the command, so that its services are no children of it.
PROGRAM = """
import os, runpy, sys
if os.fork():
    os._exit(0)
os.setsid()
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
from tests.preloaded import fork_server_early
fork_server_early()
sys.argv[:] = ["dpflow", "up", "--json", *sys.argv[2:]]
runpy.run_module("torch_dpflow.cli", run_name="__main__")
"""


class CommandedCluster(TestCluster):
    """A cluster that `dpflow up` with these arguments has started."""

    #: What the command has said of itself.
    facts: dict[str, Any]

    @classmethod
    def up(cls, folder: Path, *arguments: str) -> CommandedCluster:
        connection, log = folder / "connection", folder / "log"
        command = [str(log), "--address", str(connection), *arguments]
        with interpreter(PROGRAM, *command, env={"TMPDIR": str(folder)}) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
        facts = json.loads(line)
        cluster = cls(str(connection), facts["pid"], log)
        cluster.facts = facts
        return cluster
