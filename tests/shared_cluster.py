"""A cluster in processes of its own, which tests read from and take apart."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.new_process import ROOT, interpreter
from tests.worker_cases import has_ended
from torch_dpflow.cluster.client import open_job as client
from torch_dpflow.cluster.client.open_job import FlowDefinition, JobOptions, JobReading, SharedJob
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView, Running
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import ErrorKind, RemoteCallError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.workers.process_control import FORK_SERVER_NAME

#: How long what must happen may take, seconds: as long as a test may, nearly. It is waited out only by tests that fail,
#: and a machine with other work takes its time.
PATIENCE_S = 200.0
#: Runs a cluster apart from the test's process, so that its services are no children of it.
PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
from tests.preloaded import fork_server_early
fork_server_early()
from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
from torch_dpflow.cluster.services.node_host import stopped_by_signals
cluster = LocalCluster(
    ClusterOptions(
        connection_file=sys.argv[1],
        listen=sys.argv[2] or None,
        keys=sys.argv[4] or None,
        state=sys.argv[5] or None,
    )
)
print(os.getpid(), flush=True)
sys.stdout = open(os.devnull, "w")
os.dup2(sys.stdout.fileno(), 1)
os.dup2(os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
with stopped_by_signals(cluster.stop):
    cluster.serve()
"""


@dataclass
class TestCluster:
    """A running cluster."""

    __test__ = False

    #: Its connection file.
    address: str
    pid: int
    #: What its processes write to stderr.
    log: Path

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        listen: str = "",
        connection: Path | None = None,
        keys: Path | None = None,
        state: str = "",
        path: Path | None = None,
        first: str = "",
        descriptors: int = 0,
    ) -> TestCluster:
        """path: a folder of modules that its processes find before all others. first: code that they run first."""
        connection, log = connection or folder / "connection", folder / "log"
        # Its directory lies beside the test's own temporary files, which are watched for leftovers.
        env = {"TMPDIR": str(folder)}
        if first:
            path = folder / "modules"
            path.mkdir()
            (path / "sitecustomize.py").write_text(first)  # the module that Python imports by itself
        if path is not None:
            env["PYTHONPATH"] = f"{path}{os.pathsep}{ROOT}"
        arguments = (str(connection), listen, str(log), str(keys or ""), state)
        prefix = ["prlimit", f"--nofile={descriptors}:{descriptors}"] if descriptors else []
        with interpreter(PROGRAM, *arguments, env=env, prefix=prefix) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()
        pid = int(line)
        wait(lambda: connection.exists() or has_ended(pid), what="the connection file")
        return cls(str(connection), pid, log)

    @classmethod
    def start_over_tcp(cls, folder: Path, host: str = "127.0.0.1") -> TestCluster:
        """With keys, at a port that is free."""
        return cls.start(folder, listen=f"tcp://{host}:{free_port(host)}")

    def stop(self) -> None:
        if not has_ended(self.pid):
            os.kill(self.pid, signal.SIGTERM)
        wait(lambda: has_ended(self.pid), what="the cluster's end")

    def ask(self, method: str, kind: type) -> object:
        with find_cluster(self.address).connect() as client:
            answers: list[object] = []

            def asked() -> bool:
                try:
                    answers.append(client.call(method, reply_type=kind).body)
                except RemoteCallError as error:
                    if error.kind is not ErrorKind.OVERLOADED:  # it is starting
                        raise
                return bool(answers)

            wait(asked, what="a coordinator that has started")
            return answers[0]

    def coordinator(self) -> RpcClient:
        """Client of the coordinator, once it has loaded its state: before, it refuses every call."""
        self.flows()
        return find_cluster(self.address).connect()

    def flows(self) -> dict[str, FlowView]:
        flows = self.ask("flows", list[FlowView])  # type: ignore[arg-type]
        assert isinstance(flows, list)
        return {flow.spec.instance: flow for flow in flows}

    def owning_shards(self) -> list[int]:
        """How many shards had keys, after each change of them."""
        lines = [line for line in self.log.read_text().splitlines() if "keys assigned to shards" in line]
        return [line.partition("keys assigned")[2].count("/shard-") for line in lines]

    def processes(self, part: str = "") -> list[ProcessView]:
        views = self.ask("processes", list[ProcessView])  # type: ignore[arg-type]
        assert isinstance(views, list)
        return [view for view in views if part in view.id and view.pid]

    def running(self, *, timeout_s: float = 60.0) -> list[ProcessView]:
        """What runs, as the node says it: also while the coordinator does not answer. Not over tcp."""
        folder = find_cluster(self.address).address.rpartition("/")[0]
        with RpcClient(f"{folder}/node", options=ClientOptions(timeout_s=timeout_s)) as node:
            views: list[ProcessView] = node.call("changes", 0, reply_type=Running).body.processes
        return [view for view in views if view.pid]

    def process(self, part: str, role: str = "") -> ProcessView:
        """The first that runs of those whose id has `part` in it; awaited, as nodes tell of starts and ends later."""
        found: list[ProcessView] = []

        def listed() -> bool:
            views = self.processes(part)
            found[:] = [view for view in views if role in ("", view.role) and not has_ended(view.pid)]
            return bool(found)

        wait(listed, what=f"a process {part!r}")
        return found[0]

    def fork_server(self) -> int:
        """Return the fork server's pid. It is found by its name: it was forked early, and has another command line."""
        children = psutil.Process(self.pid).children()
        return next(int(child.pid) for child in children if child.name().startswith(FORK_SERVER_NAME))

    def kill(self, part: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the first process whose id has `part` in it; its pid."""
        pid = self.process(part).pid
        os.kill(pid, number)
        return pid


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this host that nobody has, and that the kernel gives to nobody who lets it choose."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind((host, port))
            return port


def wait(condition: Callable[[], object], *, within_s: float = PATIENCE_S, what: str = "the condition") -> None:
    """Wait until it holds; fail where it does not in time."""
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"{what} did not come within {within_s} s"
        # A condition that asks a cluster takes the processor time of what it waits for: not for most of the time.
        time.sleep(min(max(0.01, 4 * (now - began)), 0.2))


def open_job(flow: str, dataset: Any, *, address: str, options: JobOptions | None = None, **given: Any) -> SharedJob:
    """Open a job; what its `FlowDefinition` and its `JobReading` have is given by name."""
    defined = {name: given.pop(name) for name in ("version", "workers", "worker_init_fn") if name in given}
    return client.open_job(
        FlowDefinition(name=flow, dataset=dataset, **defined),
        JobReading(**given),
        address=address,
        options=options,
    )
