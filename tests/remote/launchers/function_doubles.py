"""Doubles of platforms that are billed or quota-bound, as tests of what is on top of them see them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.remote.launchers.fc_server.account import KEYS
from tests.remote.launchers.fc_server.server import FunctionServer
from tests.remote.launchers.kube_server import kube_server
from tests.remote.launchers.lambda_server import lambda_server
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.launchers.fc_deploy import deploy

#: Where the vendor's tools of Function Compute have the key of the tests.
FC_ENV = {
    "ALIBABA_CLOUD_ACCESS_KEY_ID": "AKtest",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET": KEYS["AKtest"].secret,
    "ALIBABA_CLOUD_SECURITY_TOKEN": KEYS["AKtest"].token,
}


#: What a test needs that has a double of one.
NEEDED = {"fc": "alibabacloud_fc20230330", "lambda": "awslambdaric", "kubernetes": "kubernetes"}


@dataclass(frozen=True)
class FunctionDouble:
    """One double, where all that workers need is there."""

    platform: str
    server: Any
    #: Settings of the platform beside its defaults, and variables with which it is found.
    settings: Mapping[str, Any]
    env: Mapping[str, str]
    #: How many workers it has; the pids of those that have begun.
    live: Callable[[], int]
    workers: Callable[[], list[int]]
    #: How many starts it was asked for, also of those that it has refused.
    starts: Callable[[], int]
    #: How many have ended otherwise than by themselves, with exit code 0.
    failed: Callable[[], int]
    #: What it would bill, seconds.
    billed_s: Callable[[], float]

    def toml(self) -> str:
        """Its settings, for a dpflow.toml."""
        lines = [f"{name} = {value!r}" for name, value in self.settings.items()]
        return "\n".join([f"[platform.{self.platform}]", *lines, ""])

    def kill_all(self, most: int | None = None) -> None:
        """SIGKILL to all workers, or to so many of them."""
        for pid in self.workers()[:most]:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)

    def kill_one(self) -> None:
        """SIGKILL to a worker, if there is one."""
        self.kill_all(1)


@contextmanager
def _kubernetes(cold_start_s: float) -> Iterator[FunctionDouble]:
    with kube_server(start_s=cold_start_s) as kube, tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "kubeconfig")
        config.write_text(json.dumps(kube.kubeconfig()))
        yield FunctionDouble(
            "kubernetes",
            kube,
            {"image": "r/i:1", "max_workers": 8},
            {"KUBECONFIG": str(config)},
            lambda: len(kube.pods),
            lambda: [pod.process.pid for pod in [*kube.pods.values()] if pod.process and pod.is_live],
            lambda: kube.requests["create pods"],
            lambda: kube.failed,
            lambda: kube.seconds,
        )


@contextmanager
def function_double(
    platform: str, *, cold_start_s: float = 0.0, env: Mapping[str, str] | None = None
) -> Iterator[FunctionDouble]:
    """A double of "fc", "lambda" or "kubernetes". env: variables of instances of the first."""
    if platform == "kubernetes":
        with _kubernetes(cold_start_s) as double:
            yield double
        return
    if platform == "lambda":
        with lambda_server(cold_start_s=cold_start_s) as aws:
            yield FunctionDouble(
                platform,
                aws,
                {"max_workers": 8},
                aws.env,
                lambda: aws.running,
                lambda: [pid for sandbox in [*aws.sandboxes] for pid in sandbox.workers()],
                lambda: aws.requests["POST invocations"],
                lambda: sum(one.is_error or json.loads(one.body)["code"] != 0 for one in [*aws.done]),
                aws.worker_seconds,
            )
        return
    with FunctionServer(KEYS, cold_start_s=cold_start_s, env=env) as fc:
        settings = {"max_workers": 8, "endpoint": fc.endpoint}
        before = {name: os.environ.get(name) for name in FC_ENV}
        os.environ.update(FC_ENV)
        try:
            assert [*deploy(FunctionCompute(**settings), "r/i:1")]  # type: ignore[arg-type]
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        yield FunctionDouble(
            platform,
            fc,
            settings,
            FC_ENV,
            lambda: len(fc.live()),
            lambda: [pid for task in fc.live() if task.instance for pid in task.instance.workers()],
            lambda: [action for action, _ in [*fc.log]].count("InvokeFunction"),
            lambda: sum(task.status in ("Failed", "Stopped", "Expired") for task in [*fc.tasks.values()]),
            fc.worker_seconds,
        )
