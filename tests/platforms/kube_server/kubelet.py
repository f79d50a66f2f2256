"""A pod of the double: what a kubelet does for it, with a process of this host as its container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
#: The first process of a container ignores SIGTERM unless it handles it.
_AS_FIRST = ["/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh"]


class Pod:
    """One pod, from its creation until its process has ended and somebody has removed it.

    Args:
        body: as it was created.
        start_s: how long it takes to find a node and pull its image, seconds.
        second_s: how long a second of its times of grace and of its deadline is.
        secret_of: the files of a secret, by its name; None while there is none.
        ahead_s: how much the cluster's clock is ahead of this process's, seconds.
        on_gone: called once it is removed.
    """

    def __init__(
        self,
        body: dict[str, Any],
        *,
        start_s: float,
        second_s: float,
        secret_of: Callable[[str], dict[str, bytes] | None],
        ahead_s: Callable[[], float],
        on_gone: Callable[[Pod], None],
    ) -> None:
        self.body = {
            **body,
            "metadata": {"namespace": "training", "uid": str(uuid.uuid4()), **body["metadata"]},
        }
        self.name: str = body["metadata"]["name"]
        self.process: subprocess.Popen[bytes] | None = None
        #: How long its container has run, once that has ended.
        self.seconds = 0.0
        self._start_s, self._second_s = start_s, second_s
        self._secret_of, self._ahead_s, self._on_gone = secret_of, ahead_s, on_gone
        self._waiting = "ContainerCreating"
        self._why: dict[str, str] = {}
        self._words, self._has_ended = b"", False
        self._created, self._finished = time.time(), 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="pod-"))
        #: Guards what follows; notified when any of it changes.
        self._changed = threading.Condition()
        self._grace_s: float | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="kubelet")
        self.thread.start()

    def delete(self, grace_s: float | None) -> None:
        """Have it told to end, then killed, and removed when it has ended."""
        if grace_s is None:
            grace_s = float(self.body["spec"].get("terminationGracePeriodSeconds", 30))
        with self._changed:
            self._grace_s = grace_s if self._grace_s is None else min(grace_s, self._grace_s)
            self._changed.notify_all()

    def evict(self) -> None:
        """As a node that is short of memory does."""
        assert self.process is not None
        self._why = {"reason": "Evicted", "message": "The node was low on resource: memory."}
        self.process.kill()

    @property
    def is_live(self) -> bool:
        """Whether its container runs, or may yet."""
        return not self._has_ended

    def wake(self) -> None:
        """Something that it may wait for is there."""
        with self._changed:
            self._changed.notify_all()

    def view(self) -> dict[str, Any]:
        """As the API server has it."""
        status: dict[str, Any] = {"phase": "Pending"}
        metadata, spec = dict(self.body["metadata"]), dict(self.body["spec"])
        metadata["creationTimestamp"] = self._written(self._created)
        if spec.get("nodeSelector", {}).get("pool") == "none":
            why = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            status["conditions"] = [condition]
        else:
            spec["nodeName"] = "node-1"
            state: dict[str, Any] = {"waiting": {"reason": self._waiting, "message": "no such image"}}
            if self.process is not None:
                status["phase"], state = "Running", {"running": {}}
                if self._has_ended:
                    code = self.process.returncode
                    number = 128 - code if code < 0 else code
                    status["phase"] = "Failed" if code or self._why else "Succeeded"
                    ended = {"exitCode": number, "reason": "Error" if code else "Completed"}
                    ended["finishedAt"] = self._written(self._finished)
                    if code:  # the end of its log, but of one that ended well
                        ended["message"] = self._words.decode()
                    state = {"terminated": ended}
            status["containerStatuses"] = [{"name": spec["containers"][0]["name"], "state": state}]
        if self._grace_s is not None:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            metadata["deletionGracePeriodSeconds"] = int(self._grace_s)
        return {**self.body, "metadata": metadata, "spec": spec, "status": {**status, **self._why}}

    def _run(self) -> None:
        """A kubelet's part: wait for what it needs, run it, end it."""
        try:
            if self._prepare():
                self._run_container()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        with self._changed:
            self._changed.wait_for(lambda: self._grace_s is not None)
        self._on_gone(self)

    def _prepare(self) -> bool:
        spec = self.body["spec"]
        if spec.get("nodeSelector", {}).get("pool") == "none" or spec["containers"][0]["image"] == "nowhere":
            self._waiting = "ErrImagePull"
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._grace_s is not None, self._start_s)
            self._changed.wait_for(lambda: self._grace_s is not None or self._is_mounted())
            return self._grace_s is None

    def _is_mounted(self) -> bool:
        """Fill the folders of its volumes; False while a secret is not there."""
        for volume in self.body["spec"].get("volumes", []):
            folder = self._folder / volume["name"]
            folder.mkdir(exist_ok=True)
            if "secret" in volume:
                files = self._secret_of(volume["secret"]["secretName"])
                if files is None:
                    return False
                for name, content in files.items():
                    (folder / name).write_bytes(content)
        return True

    def _run_container(self) -> None:
        (container,) = self.body["spec"]["containers"]
        mounts = {one["mountPath"]: str(self._folder / one["name"]) for one in container["volumeMounts"]}

        def there(text: str) -> str:
            """A path in the container as it is on this host."""
            for inside, outside in mounts.items():
                if text == inside or text.startswith(f"{inside}/"):
                    return outside + text.removeprefix(inside)
            return text

        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": there("/tmp")}
        env |= {one["name"]: there(one["value"]) for one in container["env"]}
        begun = time.monotonic()
        with tempfile.TemporaryFile() as words:
            with self._changed:
                if self._grace_s is not None:
                    return
                self.process = subprocess.Popen(
                    [*_AS_FIRST, sys.executable, *map(there, container["command"][1:])],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=words,
                    start_new_session=True,
                )
            self._watch(self.process)
            self.seconds = time.monotonic() - begun
            words.seek(max(0, words.seek(0, os.SEEK_END) - 2048))
            self._words, self._finished, self._has_ended = words.read(), time.time(), True

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Until its end, whose time may be up, or be set."""
        deadline_s = self.body["spec"].get("activeDeadlineSeconds", 1e6) * self._second_s
        told_at = None
        begun = time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if self._grace_s is not None and told_at is None:
                told_at = now
                process.terminate()
            if told_at is not None and now >= told_at + (self._grace_s or 0.0) * self._second_s:
                process.kill()
            if now >= begun + deadline_s:
                self._why = {"reason": "DeadlineExceeded", "message": "Pod was active on the node too long"}
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        with suppress(ProcessLookupError):  # all of the container
            os.killpg(process.pid, signal.SIGKILL)

    def _written(self, seconds: float) -> str:
        """A time by the cluster's clock, as it writes it."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds + self._ahead_s()))
