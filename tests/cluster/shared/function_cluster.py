"""A cluster whose workers are members of a double, for tests that share it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cluster.shared.test_shared_platform import keys
from tests.cluster_command import CommandedCluster
from tests.remote.launchers.function_doubles import NEEDED, FunctionDouble, function_double
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import SharedJob

WORKERS = 4


@dataclass
class FunctionCluster:
    """A cluster, and the double that its provisioner calls."""

    double: FunctionDouble
    cluster: CommandedCluster


@contextmanager
def function_cluster(platform: str, folders: pytest.TempPathFactory) -> Iterator[FunctionCluster]:
    """One of "fc", "lambda" or "kubernetes"."""
    pytest.importorskip(NEEDED[platform])
    with function_double(platform) as double:
        cluster = up(double, folders)
        yield FunctionCluster(double, cluster)
        cluster.stop()
        wait(lambda: not double.live(), what="the end of all members")


def up(
    double: FunctionDouble, folders: pytest.TempPathFactory, env: Mapping[str, str] | None = None
) -> CommandedCluster:
    """A cluster whose provisioner calls this double. env: variables of its processes."""
    folder = folders.mktemp("c")
    (folder / "dpflow.toml").write_text(double.toml())
    with pytest.MonkeyPatch.context() as patch:
        given = {**double.env, "DPFLOW_CONFIG": str(folder / "dpflow.toml"), **(env or {})}
        for name, value in given.items():
            patch.setenv(name, value)
        return CommandedCluster.up(
            folder, "--platform", double.platform, "--workers", str(WORKERS), "--autoscale", f"0:{WORKERS}"
        )


def told(cluster: CommandedCluster) -> Any:
    """What `dpflow workers --json` says."""
    result = CliRunner().invoke(root, ["workers", "--json", "--address", cluster.address])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


class Endless:
    """Reads sample after sample, batch by batch, until it is told that the epoch has no more."""

    def __init__(self, job: SharedJob) -> None:
        self.drawn = 0
        self._ends = False
        self._batches = iter(job.read(self._plan(), 0))
        self.read: list[int] = []

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Read at least one batch, and on until this holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.read += keys([next(self._batches)])
            if condition():
                return
            assert time.monotonic() < deadline, what

    def finish(self) -> None:
        """Read the rest: each sample has come once, in order."""
        self._ends = True
        self.read += keys(self._batches)
        assert self.read == [*range(self.drawn)]

    def _plan(self) -> Iterator[range]:
        while not self._ends:
            self.drawn += 8
            yield range(self.drawn - 8, self.drawn)
