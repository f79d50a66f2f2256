"""Workers as pods of a Kubernetes cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch_dpflow._core.checks import check_fields, check_int, check_number, check_type, parse_duration
from torch_dpflow.errors import AnswerLostError, OptionError, OptionTypeError, PlatformError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import AdoptingPlatform, Fate, Finding, Launcher, Ref, check_tcp, require
from torch_dpflow.remote.launchers.kubernetes_pods import FILE, REQUIRED, Pods
from torch_dpflow.remote.launchers.kubernetes_specs import (
    FLEET,
    GRACE_S,
    HOME,
    SAFE_CONTAINER,
    SELECTOR,
    START_S,
    SWEEP_S,
    check_container,
    check_label,
    check_pod,
    check_quantity,
    fate_of,
    is_left,
    labels_of,
    merged,
    safe_pod,
)
from torch_dpflow.remote.launchers.processes import MODULE
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, Limits

#: How much longer than its worker's lifetime a pod may exist, including its start, in seconds.
MARGIN_S = 900.0
#: Grace of a pod that is ended by force, in seconds: with 0 Kubernetes does not wait for its end.
FORCED_S = 1
#: Where a worker finds its launch spec, and may write.
_LAUNCH_SPECS, _TEMPORARY = "/var/run/dpflow", "/tmp"


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """`platform="kubernetes"`: workers as pods, in the cluster of the kubeconfig or of this pod.

    Pods must be able to connect to this process. It must therefore run in the cluster, or in a network with a route to
    the pods.

    Args:
        image: image of the pods, with torch_dpflow and torch; `dpflow image` writes its Dockerfile.
        namespace: namespace of the pods; empty: the namespace in the kubeconfig, or of this pod.
        requests: resources of each pod, such as {"cpu": "1", "memory": "2Gi"}; also its limits, except for "cpu".
        node_selector: labels of the nodes on which the pods may run.
        service_account: account of the pods; empty: the namespace's default account, without a mounted token.
        user: user id of the pods' processes, above 0: root is not allowed.
        lifetime: time after which a worker is replaced, such as "12h", or a number of seconds.
        max_workers: maximum number of concurrent workers; 0: no limit.
        context: context of the kubeconfig; empty: the current one.
        pod, container: additions to the spec of a pod, such as tolerations, and to that of its container, such as
            envFrom, as Kubernetes writes them. Lists are appended to the existing ones.
        price_per_hour: price of one worker for an hour, for reports.

    Raises:
        OptionError: a value is out of range.
        OptionTypeError: a value is of the wrong type.
    """

    image: str = ""
    namespace: str = ""
    requests: Mapping[str, str] = field(default_factory=lambda: {"cpu": "1", "memory": "2Gi"})
    node_selector: Mapping[str, str] = field(default_factory=dict)
    service_account: str = ""
    user: int = 1000
    lifetime: float | str = "1d"
    max_workers: int = 0
    context: str = ""
    #: Not shown: variables may be keys.
    pod: Mapping[str, Any] = field(default_factory=dict, repr=False)
    container: Mapping[str, Any] = field(default_factory=dict, repr=False)
    price_per_hour: float = 0.0

    name = "kubernetes"
    sends_code = True

    def __post_init__(self) -> None:
        for text in ("image", "namespace", "service_account", "context"):
            check_type(text, getattr(self, text), str, "text")
        check_pod(self.pod)
        check_container(self.container)
        for table in ("requests", "node_selector"):
            check_type(table, getattr(self, table), Mapping, "a dict")
            for key, value in getattr(self, table).items():
                if not isinstance(key, str) or not isinstance(value, str):
                    raise OptionTypeError(f"{table}[{key!r}]={value!r:.80}: give text, as Kubernetes has it")
        for key, value in self.requests.items():
            check_quantity(f"requests[{key!r}]", value, zero=True)
        if re.search(r"\s", self.image):
            raise OptionError(f"image={self.image!r:.300}: give REGISTRY/NAME:TAG, without spaces")
        if self.namespace:
            check_label("namespace", self.namespace)
        if self.service_account:
            check_label("service_account", self.service_account, longest=253, dots=True)
        check_fields(self, check_int, "max_workers", minimum=0)
        check_fields(self, check_int, "user", minimum=1, maximum=2**31 - 1)
        check_fields(self, check_number, "price_per_hour")
        _ = self.lifetime_s

    @property
    def lifetime_s(self) -> float:
        """`lifetime` in seconds."""
        return parse_duration("lifetime", self.lifetime)

    def check_installed(self) -> None:
        require(*REQUIRED)

    def check_workers(self, workers: int) -> None:
        if not self.image:
            raise OptionError(
                "platform='kubernetes' needs an image with torch_dpflow, as `dpflow image` has it built: give image in "
                "[platform.kubernetes], DPFLOW_PLATFORM_KUBERNETES_IMAGE, or Kubernetes(image=...)"
            )
        if self.max_workers and workers > self.max_workers:
            raise OptionError(
                f"{workers} workers on platform='kubernetes' with max_workers={self.max_workers}: give fewer, or raise "
                "that"
            )

    def launcher(self) -> Launcher:
        return KubernetesLauncher(self)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        self.check_workers(0)
        return ThreadedPlatform(self.launcher(), sweep_s=SWEEP_S)

    def listen_at(self) -> str:
        return "tcp://0.0.0.0:0"

    def check_listen(self, address: str) -> None:
        # Also if the API server is on this host, as kind's is: pods have a separate network.
        advice = "pods cannot reach it; give the address of this pod or host, or tcp://0.0.0.0:7700"
        check_tcp(address, loopback=False, advice=advice)


class KubernetesLauncher:
    """Launcher of workers as pods of a namespace.

    A pod waits for a secret with its launch spec. Kubernetes deletes the secret together with the pod.

    Args:
        settings: the settings of the pods.
        module: the Python module that a pod runs, as `python -m` does.

    Raises:
        MissingExtraError: the client is not installed.
        OptionError: no cluster is configured, or one on another host without https.
    """

    def __init__(self, settings: Kubernetes, *, module: str = MODULE) -> None:
        self._settings, self._module = settings, module
        self.limits = Limits(
            max_lifetime_s=settings.lifetime_s,
            grace_s=GRACE_S,
            max_workers=settings.max_workers or None,
            # An API server allows a client some tens of requests a second, and a start is two.
            starts_per_s=20.0,
            # A node may have to be added, and an image be pulled.
            start_timeout_s=(30.0, START_S),
        )
        self._pods = Pods(settings.namespace, settings.context)
        #: The logged reason why pods wait for a node.
        self._logged_reason = ""

    def check(self) -> Sequence[Finding]:
        there = [pod for pod in self._pods.list(SELECTOR) if fate_of(pod).end is None]
        self._settings.check_workers(0)
        self._pods.create(self._body("dpf-check", labels_of("dpf-check")), is_trial=True)
        self._pods.uid_of("dpf-check")
        self._pods.delete("dpf-check", grace_s=FORCED_S, is_trial=True)
        self._pods.give("dpf-check", "0", labels_of("dpf-check"), b"", is_trial=True)
        text = f"{self._pods.host} would create pods in namespace {self._pods.namespace!r}"
        return [Finding(True, f"{text}, where {len(there)} workers are")]

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        labels = labels_of(name)
        try:
            uid = self._pods.create(self._body(name, labels))
        except AnswerLostError:
            found = self._pods.uid_of(name)
            if found is None:
                raise
            uid = found
        try:
            self._pods.give(name, uid, labels, launch_spec)
        except AnswerLostError:
            raise
        except PlatformError as error:
            try:  # without a launch spec it would wait forever
                self._pods.delete(name, grace_s=FORCED_S)
            except PlatformError as left:
                raise AnswerLostError(f"{error}; {left}") from error
            raise
        return name

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        fleets = ",".join(sorted({labels_of(name)[FLEET] for name in workers}))
        pods = {pod["metadata"]["name"]: pod for pod in self._pods.list(f"{SELECTOR},{FLEET} in ({fleets})")}
        fates = {name: fate_of(pods[name]) for name in workers if name in pods}
        for name, fate in fates.items():
            if fate.end is not None:
                with suppress(PlatformError):  # a pod that has ended stays until it is removed
                    self._pods.delete(name, grace_s=FORCED_S)
        self._log_waiting([pods[name] for name in fates])
        return fates

    def stop(self, name: str, ref: Ref | None) -> None:
        self._pods.delete(name, grace_s=FORCED_S)

    def list(self, prefix: str) -> Mapping[str, Ref]:
        """Return the refs of live workers. Also removes pods that killed processes have left behind."""
        found = {pod["metadata"]["name"]: pod for pod in self._pods.list(SELECTOR)}
        with suppress(PlatformError):
            for name in [name for name, pod in found.items() if is_left(pod, time.time())]:
                del found[name]
                self._pods.delete(name, grace_s=FORCED_S)
        return {name: name for name, pod in found.items() if name.startswith(prefix) and not fate_of(pod).end}

    def close(self) -> None:
        self._pods.close()

    def _log_waiting(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Log once why pods have no node. Such pods wait for the time that adding a node may take."""
        whys = {
            str(condition.get("message", ""))
            for pod in pods
            for condition in pod.get("status", {}).get("conditions", [])
            if condition.get("reason") == "Unschedulable"
        }
        if whys and self._logged_reason != (why := min(whys)):
            SERVICE.warning("workers wait for a node of Kubernetes: %s", why[:MAX_REPORT_CHARS])
        self._logged_reason = min(whys, default="")

    def _body(self, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
        settings = self._settings
        # Not of processors: a limit there stops a worker for parts of each 100 ms, even on an idle node.
        limits = {key: value for key, value in settings.requests.items() if key != "cpu"}
        container = {
            "name": "worker",
            "image": settings.image,
            "command": ["python", "-m", self._module, f"{_LAUNCH_SPECS}/{FILE}"],
            "env": [*HOME],
            "resources": {"requests": {**settings.requests}, "limits": limits},
            "securityContext": SAFE_CONTAINER,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "launch-spec", "mountPath": _LAUNCH_SPECS, "readOnly": True},
                {"name": "tmp", "mountPath": _TEMPORARY},
            ],
        }
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(settings.lifetime_s + MARGIN_S),
            "terminationGracePeriodSeconds": int(GRACE_S),
            "automountServiceAccountToken": bool(settings.service_account),
            "enableServiceLinks": False,
            "securityContext": safe_pod(settings.user),
            "volumes": [
                {"name": "launch-spec", "secret": {"secretName": name, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {}},
            ],
            "containers": [merged(container, settings.container)],
        }
        if settings.node_selector:
            spec["nodeSelector"] = {**settings.node_selector}
        if settings.service_account:
            spec["serviceAccountName"] = settings.service_account
        metadata = {"name": name, "labels": {**labels}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": merged(spec, settings.pod)}
