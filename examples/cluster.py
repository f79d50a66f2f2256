"""A cluster for an example: a running one, or one that is started and stopped with the example."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import DPFlowError

#: Timeouts for the answer of a running cluster, and for the start of a new one, seconds.
ANSWER_S, START_S = 20.0, 60.0


@contextmanager
def found_or_started(address: str) -> Iterator[str]:
    """Yield `address`, or for "auto" without a running cluster the address of a new one."""
    if address != "auto" or _answers(address):
        yield address
    else:
        with started() as own:
            yield own


@contextmanager
def started(*, platform: str = "", worker_listen: str = "", listen: str = "") -> Iterator[str]:
    """Run a cluster, and yield the path of its connection file.

    platform: what runs its workers; empty: this host. worker_listen: where they connect to; empty: where the platform
        suggests.
    listen: where other hosts connect; empty: none can.
    """
    with tempfile.TemporaryDirectory(prefix="torch_dpflow-") as folder:
        path = Path(folder, "connection")
        command = [sys.executable, "-m", "torch_dpflow.cli", "up", f"--address={path}"]
        command += ["--log-level=warning"]
        command += [f"--platform={platform}"] if platform else []
        command += [f"--worker-listen={worker_listen}"] if worker_listen else []
        command += [f"--listen={listen}"] if listen else []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as node:
            try:
                _wait_for(path, node)
                yield str(path)
            finally:
                node.terminate()


def processes(address: str) -> list[ProcessView]:
    """Return the processes of a cluster, with figures that are up to a second old."""
    with find_cluster(address).connect() as coordinator:
        views: list[ProcessView] = coordinator.call("processes", reply_type=list[ProcessView]).body
    return views


def loads(address: str, flow: str = "") -> int:
    """Return the number of samples that a cluster has loaded, for one flow or for all."""
    views = [view for view in processes(address) if view.role == "shard" and view.id.startswith(flow)]
    return sum(int(view.status.get("loads", 0)) for view in views)


def _answers(address: str) -> bool:
    try:
        with find_cluster(address).connect(timeout_s=ANSWER_S) as coordinator:
            coordinator.call("processes", reply_type=list[ProcessView])
    except DPFlowError:
        return False
    return True


def _wait_for(path: Path, node: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while not (path.exists() and _answers(str(path))):
        if node.poll() is not None:
            raise RuntimeError(f"`{' '.join(map(str, node.args))}` ended with {node.returncode}: see above")  # type: ignore[union-attr]
        if time.monotonic() > deadline:
            raise TimeoutError(f"no cluster answered within {START_S:g} s")
        time.sleep(0.02)
