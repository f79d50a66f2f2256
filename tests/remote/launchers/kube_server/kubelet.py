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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
#: The first process of a container ignores SIGTERM unless it handles it.
_AS_FIRST = ["/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh"]

#: Where who is isolated finds its volumes.
_SHOWN = "/mnt"
#: Writes to its volumes alone, as a user that is not root, to whom an interpreter in root's home is shown.
_ISOLATED = """
folder=$1 shown=$2 python=$3 user=$4 group=$5 fs=$6; shift 6
case "$python" in /root/*)
    mount --bind "$python" "$shown"
    mount -t tmpfs -o mode=755 none /root
    mkdir -p "$python"; mount --move "$shown" "$python";;
esac
mount --bind "$folder" "$shown"
mount -o remount,bind,ro /
exec setpriv --reuid "$user" --regid "$group" --groups "$fs" --no-new-privs --bounding-set=-all "$@"
"""


class Pod:
    """One pod, from its creation until its process has ended and somebody has removed it.

    Args:
        body: as it was created.
        start_s: how long it takes to find a node and pull its image, seconds.
        second_s: how long a second of its times of grace and of its deadline is.
        files_of: the files of a volume, by its source in the spec; None while they are not there.
        ip: its address.
        config: the text of a kubeconfig, in place of the token that a pod with a service account finds; empty: none.
        isolates: whether it is its spec's user, and its root file system read-only where the spec says so. Needs root.
        ahead_s: how much the cluster's clock is ahead of this process's, seconds.
        on_gone: called once it is removed.
    """

    def __init__(
        self,
        body: dict[str, Any],
        *,
        start_s: float,
        second_s: float,
        files_of: Callable[[Mapping[str, Any]], dict[str, bytes] | None],
        ahead_s: Callable[[], float],
        on_gone: Callable[[Pod], None],
        ip: str = "127.0.0.1",
        config: str = "",
        isolates: bool = False,
    ) -> None:
        self.body = {
            **body,
            "metadata": {"namespace": "training", "uid": str(uuid.uuid4()), **body["metadata"]},
        }
        self.name: str = body["metadata"]["name"]
        self.process: subprocess.Popen[bytes] | None = None
        self._env: dict[str, str] = {}
        #: How often its container was started again.
        self.restarts = 0
        #: How long its container has run, once that has ended.
        self.seconds = 0.0
        self._start_s, self._second_s = start_s, second_s
        self._files_of, self._ahead_s, self._on_gone = files_of, ahead_s, on_gone
        self._ip, self._config, self._isolates = ip, config, isolates
        self._waiting = "ContainerCreating"
        self._why: dict[str, str] = {}
        self._words, self._has_ended = b"", False
        self._created, self._finished = time.time(), 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="pod-"))
        self._folder.chmod(0o755)
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

    @property
    def is_ending(self) -> bool:
        """Whether it was deleted."""
        return self._grace_s is not None

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
            while self._restarts():
                self._run_container()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        with self._changed:
            self._changed.wait_for(lambda: self._grace_s is not None)
        self._on_gone(self)

    def _restarts(self) -> bool:
        """Whether its container has ended and is to run again; at once, where Kubernetes waits longer each time."""
        with self._changed:
            is_kept = self.body["spec"].get("restartPolicy", "Always") == "Always" and self._grace_s is None
            if is_kept and self._has_ended:
                self.restarts, self._has_ended = self.restarts + 1, False
                return True
            return False

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
        group = self.body["spec"]["securityContext"]["fsGroup"] if self._isolates else -1
        for volume in self.body["spec"].get("volumes", []):
            folder = self._folder / volume["name"]
            folder.mkdir(exist_ok=True)
            os.chown(folder, -1, group)
            if "secret" not in volume and "configMap" not in volume:
                folder.chmod(0o2777)
                continue
            files = self._files_of(volume)
            if files is None:
                return False
            for name, content in files.items():
                mode = volume.get("secret", {}).get("defaultMode", 0o644)
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    os.fchown(descriptor, -1, group)
                    # Where there is a group it may always read.
                    os.fchmod(descriptor, mode | 0o440 if self._isolates else 0o400)
        return True

    def _run_container(self) -> None:
        (container,) = self.body["spec"]["containers"]
        shown = _SHOWN if self._isolates else str(self._folder)
        mounts = {one["mountPath"]: f"{shown}/{one['name']}" for one in container["volumeMounts"]}

        def there(text: str) -> str:
            """A path in the container as it is on this host."""
            for inside, outside in mounts.items():
                if text == inside or text.startswith(f"{inside}/"):
                    return outside + text.removeprefix(inside)
            return text

        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": there("/tmp")}
        if self.body["spec"].get("automountServiceAccountToken") and self._config:
            env["KUBECONFIG"] = f"{shown}/kubeconfig"
            (self._folder / "kubeconfig").write_text(self._config)
        given = {one["name"]: self._value(one) for one in container["env"]}
        self._env = env = env | {name: there(value) for name, value in given.items()}
        words_of = [*container["command"][1:], *container.get("args", [])]
        for name, value in given.items():
            words_of = [word.replace(f"$({name})", value) for word in words_of]
        begun = time.monotonic()
        with tempfile.TemporaryFile() as words:
            with self._changed:
                if self._grace_s is not None:
                    return
                self.process = subprocess.Popen(
                    [*_AS_FIRST, *self._isolation(), sys.executable, *map(there, words_of)],
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

    def _value(self, variable: Mapping[str, Any]) -> str:
        """Of a variable of the environment."""
        if "value" in variable:
            return str(variable["value"])
        return {"status.podIP": self._ip, "metadata.name": self.name}[variable["valueFrom"]["fieldRef"]["fieldPath"]]

    def _isolation(self) -> list[str]:
        if not self._isolates:
            return []
        spec = self.body["spec"]
        assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
        ids = spec["securityContext"]
        numbers = [str(ids[key]) for key in ("runAsUser", "runAsGroup", "fsGroup")]
        places = [str(self._folder), _SHOWN, sys.base_prefix]
        return ["unshare", "--mount", "sh", "-ec", _ISOLATED, "sh", *places, *numbers]

    def is_well(self) -> bool:
        """Whether the command of its liveness probe succeeds in the container."""
        assert self.process is not None
        (container,) = self.body["spec"]["containers"]
        probe = container["livenessProbe"]
        command = [sys.executable, *probe["exec"]["command"][1:]]
        if self._isolates:
            ids = self.body["spec"]["securityContext"]
            user = ["--setuid", str(ids["runAsUser"]), "--setgid", str(ids["runAsGroup"])]
            command = ["nsenter", "--target", str(self.process.pid), "--mount", *user, *command]
        with suppress(subprocess.TimeoutExpired):
            limit_s = probe["timeoutSeconds"] * self._second_s
            return not subprocess.run(command, env=self._env, capture_output=True, timeout=limit_s).returncode
        return False

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
