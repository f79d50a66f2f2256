"""Nodes that join a cluster, in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.new_process import ROOT, Interpreter
from tests.shared_cluster import TestCluster, wait
from torch_dpflow.cluster.messages.node import NodeView


class StartedNode:
    """`dpflow node --join`, started as a user does."""

    def __init__(
        self,
        cluster: TestCluster,
        name: str,
        log: Path,
        *,
        prefix: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        """prefix: runs a command on another host. folder: for temporary files, if it is this one."""
        self.name, self.log = name, log
        own = {"TMPDIR": str(folder)} if folder is not None else {}
        with open(log, "ab") as out:
            self.process = Interpreter(
                [*prefix, *_command(cluster), "--name", name],
                preloaded=not prefix,
                fork_server=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **own},
                stdout=out,
                stderr=out,
            )

    def __repr__(self) -> str:
        return f"{self.name}: {self.log.read_text()}"

    def stop(self) -> int:
        """Have it leave; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _command(cluster: TestCluster) -> list[str]:
    return [sys.executable, "-m", "torch_dpflow.cli", "node", "--join", cluster.address]


def nodes_of(cluster: TestCluster) -> dict[str, NodeView]:
    """The nodes of a cluster, by name."""
    views = cluster.ask("nodes", list[NodeView])  # type: ignore[arg-type]
    assert isinstance(views, list)
    return {view.name: view for view in views}


@contextmanager
def started(*nodes: StartedNode) -> Iterator[None]:
    """Have them end."""
    try:
        yield
    finally:
        for node in nodes:
            node.kill()


def await_nodes(cluster: TestCluster, *names: str) -> None:
    """Wait until these are a cluster's nodes."""
    wait(lambda: sorted(nodes_of(cluster)) == sorted(names), what=f"the nodes {names}")
