"""Invocations of a double of Function Compute: each has a thread, which finds or boots an instance and calls it."""

from __future__ import annotations

import http.client
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.remote.launchers.fc_server.instances import Instance, Templates, freeze, spawn, thaw
from tests.shared_cluster import free_port

LIVE = ("Enqueued", "Running", "Stopping")


@dataclass(frozen=True)
class Place:
    """Where instances are: as of `FunctionServer`."""

    fork: bool
    prefix: Sequence[str]
    near: str
    env: Mapping[str, str]


@dataclass
class Task:
    id: str
    function: str
    payload: bytes
    status: str = "Enqueued"
    instance: Instance | None = None
    answer: str = ""
    error: str = ""
    #: When it was asked for; began to be billed, which is when its instance has it; and ended; by `time.monotonic`.
    asked: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    ended: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def to_map(self) -> dict[str, Any]:
        has = {"taskId": self.id, "status": self.status, "alreadyRetriedTimes": 0}
        has |= {"instanceId": self.instance.id} if self.instance else {}
        has |= {"returnPayload": self.answer} if self.answer else {}
        if self.begun:
            has |= {"startedTime": self._wall_ms(self.begun)}
        if self.begun and self.ended:
            has |= {
                "endTime": self._wall_ms(self.ended),
                "durationMs": round(1000 * (self.ended - self.begun)),
            }
        return has | ({"taskErrorMessage": self.error} if self.error else {})

    def _wall_ms(self, then: float) -> int:
        return round(1000 * (time.time() - time.monotonic() + then))


class Invocations:
    """Those of one account, and its instances."""

    def __init__(self, cold_start_s: float, quota: int, place: Place) -> None:
        self.cold_start_s, self.quota = cold_start_s, quota
        #: How long an invocation waits before anything is done for it, seconds.
        self.late_s = 0.0
        self.functions: dict[str, dict[str, Any]] = {}
        self._place = place
        self._templates = Templates(place.env)
        self._idle: dict[str, list[Instance]] = {}
        self._busy = 0
        #: Guards all that; notified when an invocation ends.
        self._changed = threading.Condition()

    def prepare(self, function: str, count: int) -> None:
        """Boot so many instances beforehand; the first invocation of each still takes a cold start."""
        for _ in range(count):
            instance = self._boot(self.functions[function])
            instance.is_fresh = True
            with self._changed:
                self._idle.setdefault(function, []).append(instance)

    def _end(self, instance: Instance) -> None:
        """End an instance by force: with its hook, if it listens."""
        with suppress(OSError, http.client.HTTPException):
            instance.call("GET", "/pre-stop", {}, b"", 1.0)
        instance.kill()

    def _run(self, task: Task, age_s: float) -> None:
        try:
            self._serve_task(task, time.monotonic() + age_s)
        except Exception as error:
            self._finish(task, "Failed", error=f"{type(error).__name__}: {error}")
            traceback.print_exc()

    def _serve_task(self, task: Task, expires: float) -> None:
        task.stop.wait(self.late_s)
        with self._changed:
            while self._busy >= self.quota and not task.stop.is_set():
                if not self._changed.wait(max(0.0, min(0.2, expires - time.monotonic()))) and (
                    time.monotonic() >= expires
                ):
                    self._finish(task, "Expired")
                    return
            if task.stop.is_set():
                self._finish(task, "Stopped")
                return
            self._busy += 1
            idle = self._idle.get(task.function)
            task.instance = idle.pop() if idle else None
        try:
            self._call(task)
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _call(self, task: Task) -> None:
        function = self.functions[task.function]
        instance = task.instance
        if (instance is None or instance.is_fresh) and task.stop.wait(self.cold_start_s):
            self._finish(task, "Stopped")
            return
        if instance is None:
            instance = self._boot(function)
        instance.is_fresh = False
        thaw(instance)
        with self._changed:
            task.instance = instance
        with self._changed:
            if task.stop.is_set():
                task.status = "Stopping"
            else:
                task.status = "Running"
        if task.stop.is_set():
            instance.kill()
            self._finish(task, "Stopped")
            return
        self._invoke_instance(task, instance, function)

    def _invoke_instance(self, task: Task, instance: Instance, function: Mapping[str, Any]) -> None:
        headers = {"x-fc-request-id": task.id, "x-fc-control-path": "/invoke"}
        if function.get("role"):
            headers |= {
                "x-fc-access-key-id": "STS.of-the-role",
                "x-fc-access-key-secret": "secret-of-the-role",
                "x-fc-security-token": f"token-for-{task.id}",
            }
        task.begun = time.monotonic()
        try:
            status, body = instance.call("POST", "/invoke", headers, task.payload, function["timeout"])
        except TimeoutError:
            instance.kill()
            self._finish(task, "Failed", error=f"Function time out after {function['timeout']} s")
        except (OSError, http.client.HTTPException) as error:
            instance.kill()
            how = "Stopped" if task.stop.is_set() else "Failed"
            self._finish(task, how, error=f"UnhandledInvocationError: the instance has exited ({error!r})")
        else:
            with self._changed:  # a stop comes before this or finds it ended
                if not task.stop.is_set():
                    freeze(instance)
                    self._idle.setdefault(task.function, []).append(instance)
                    self._finish(task, "Succeeded" if status == 200 else "Failed", answer=body.decode())
                    return
            instance.kill()
            self._finish(task, "Stopped")

    def _boot(self, function: Mapping[str, Any]) -> Instance:
        config = function["customContainerConfig"]
        command = [*(config.get("entrypoint") or []), *(config.get("command") or [])]
        port = free_port()
        env = {**self._place.env, **(function.get("environmentVariables") or {}), "FC_SERVER_PORT": str(port)}
        if self._place.fork:
            pid, process = (
                self._templates.fork(command[3] if len(command) > 3 else "torch_dpflow.remote.worker", port, env),
                None,
            )
        else:
            process = spawn(command, self._place.prefix, env)
            pid = process.pid
        instance = Instance(pid, port, self._place.near, process)
        instance.is_elsewhere = bool(self._place.prefix)
        instance.await_ready()
        return instance

    def _finish(self, task: Task, status: str, *, answer: str = "", error: str = "") -> None:
        with self._changed:
            task.status, task.answer, task.error = status, answer, error
            task.ended = time.monotonic()
            self._changed.notify_all()

    def _drop_idle(self, function: str) -> None:
        for instance in self._idle.pop(function, []):
            thaw(instance)
            instance.kill()
