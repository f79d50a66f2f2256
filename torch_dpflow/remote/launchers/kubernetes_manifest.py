"""Objects of a cluster on Kubernetes: its coordinator, nodes, permissions, network policies and secrets.

The coordinator is a pod of a StatefulSet, so that its name stays while its address changes. Its workers are pods that
it creates itself, or processes of pods that join it as nodes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch_dpflow._core.checks import MAX_PORT, check_fields, check_int
from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.kubernetes import Kubernetes
from torch_dpflow.remote.launchers.kubernetes_node_pods import NodePods, resources_of
from torch_dpflow.remote.launchers.kubernetes_specs import (
    HOME,
    LABELS,
    RULES,
    SAFE_CONTAINER,
    check_label,
    check_quantity,
    field_env,
    safe_pod,
)

#: Label that pods of jobs need to connect to the cluster; its value is the cluster's name.
JOBS = "dpflow-cluster"
#: Where the coordinator, and pods with the secret for jobs, find their files.
SETTINGS, KEYS, STATE = "/etc/dpflow", "/var/run/dpflow", "/var/lib/dpflow"
#: Names of these files, in the objects and in the folders.
_TOML, _KEYS, CONNECTION, _URL = "dpflow.toml", "keys.json", "connection.json", "url"
#: Memory of the coordinator's processes in addition to samples, in bytes: torch's code, once, and buffers.
_OWN_BYTES = 2 << 30
_GRACE_S = 60
#: Ports of the metrics, and of the live page, which can be reached only from within the pod.
METRICS_PORT, PAGE_PORT = 9400, 8265
#: Lower ports are reserved for root on most networks.
_MIN_PORT = 1024
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_REDIS = re.compile(r"rediss?://[\w.-]+(:\d{1,5})?/\d{1,4}", re.ASCII)
#: A StatefulSet's pods have a label with its name and eleven characters, and labels have 63.
_MAX_NAME = 52


@dataclass(frozen=True, kw_only=True)
class ClusterManifest:
    """Manifest of a cluster: its coordinator and everything else that Kubernetes needs.

    Args:
        workers: settings of the flows' workers, which run in the same Kubernetes cluster, from the same image.
        scaling: options of `dpflow up` that set the number of workers.
        name: name of the cluster and of its objects.
        hold_s: time for which a paused job keeps its workers, in seconds. memory_bytes: memory for samples.
        cpu: processors that the coordinator requests, as a quantity of Kubernetes.
        state: URL of the Redis in which flows are stored: redis://HOST:PORT/NUMBER. Flows are lost when the coordinator
            ends if `state`, `state_secret` and `state_size` are all empty.
        state_secret: instead of `state`, the name of a secret whose key `url` contains that URL.
        state_size, storage_class: instead of Redis, the size of a volume for flows, and its storage class, if any.
        port, worker_ports: the port to which jobs connect, and the ports FIRST-LAST to which workers connect.
        nodes: pods that join the cluster and run workers as processes. With a count of 0, each worker is a pod.
        jobs_in: the namespaces of jobs; empty: the workers' namespace.
        metrics_to: the namespace whose pods read metrics; empty: metrics are off.
        page: whether to serve the live page, on a port inside the pod.

    Raises OptionError or OptionTypeError if a value is not allowed.
    """

    workers: Kubernetes
    scaling: Sequence[str]
    name: str = "dpflow"
    hold_s: float = 120.0
    memory_bytes: int = 8 << 30
    cpu: str = "2"
    state: str = ""
    state_secret: str = ""
    state_size: str = ""
    storage_class: str = ""
    port: int = 7600
    worker_ports: str = "7700-7799"
    nodes: NodePods = field(default_factory=NodePods)
    jobs_in: Sequence[str] = ()
    metrics_to: str = ""
    page: bool = False

    def __post_init__(self) -> None:
        check_label("--name", self.name, longest=_MAX_NAME, begins_with_letter=True)
        for namespace in (self.namespace, *self.jobs_in, *([self.metrics_to] if self.metrics_to else ())):
            check_label("namespace", namespace)
        check_quantity("--cpu", self.cpu)
        check_fields(self, check_int, "port", minimum=_MIN_PORT, maximum=MAX_PORT)
        first, last = self._worker_ports()
        for name, port, is_used in (("metrics", METRICS_PORT, self.metrics_to), ("the page", PAGE_PORT, self.page)):
            if is_used and (port == self.port or first <= port <= last):
                raise OptionError(f"port {port} is that of {name}: give other --port and --worker-ports")
        if first <= self.port <= last:
            raise OptionError(f"--port {self.port} is one of --worker-ports {self.worker_ports}: give another")
        self._check_state()

    def _check_state(self) -> None:
        given = [text for text in (self.state, self.state_secret, self.state_size) if text]
        if len(given) > 1:
            raise OptionError("--state, --state-secret and --state-size exclude each other: give one of them")
        if self.storage_class and not self.state_size:
            raise OptionError(
                f"--storage-class {self.storage_class!r} without --state-size: say how large, as --state-size 1Gi"
            )
        if self.state_size:
            check_quantity("--state-size", self.state_size)
        for name, text in (("--state-secret", self.state_secret), ("--storage-class", self.storage_class)):
            if text:
                check_label(name, text, longest=253, dots=True)
        if self.state and not _REDIS.fullmatch(self.state):
            raise OptionError(
                "--state: give redis://HOST:PORT/NUMBER. A URL with a password belongs in a secret: kubectl create "
                f"secret generic NAME --from-literal={_URL}=redis://..., and --state-secret NAME. For a file, give "
                "--state-size, the size of its volume"
            )

    def _worker_ports(self) -> tuple[int, int]:
        found = _PORTS.fullmatch(self.worker_ports)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not _MIN_PORT <= first <= last <= MAX_PORT:
            raise OptionError(
                f"--worker-ports {self.worker_ports!r:.80}: give FIRST-LAST from {_MIN_PORT} to {MAX_PORT}, as "
                "7700-7799"
            )
        return first, last

    @property
    def namespace(self) -> str:
        return self.workers.namespace or "default"

    @property
    def address(self) -> str:
        """Address to which jobs connect, with the DNS name of the coordinator's pod, which does not change."""
        return f"tcp://{self.name}-0.{self.name}.{self.namespace}.svc:{self.port}"

    def objects(self, *, public: str = "") -> Iterator[dict[str, Any]]:
        """Yield all Kubernetes objects except secrets.

        public: public part of the cluster's keys; when it changes, pods with the keys are replaced. Empty: unknown.
        """
        yield self._object("v1", "ServiceAccount", automountServiceAccountToken=False)
        if not self.nodes.count:
            yield from self._rights()
        settings = self._settings()
        yield self._object("v1", "ConfigMap", data={_TOML: settings})
        ports = [{"name": "jobs", "port": self.port, "protocol": "TCP"}]
        service: dict[str, Any] = {"clusterIP": "None", "selector": self._labels, "ports": ports}
        service["publishNotReadyAddresses"] = True  # its own pod is found before it is ready: jobs wait for it
        yield self._object("v1", "Service", spec=service)
        yield from self._policies()
        digest = hashlib.sha256(f"{settings}\0{public}".encode()).hexdigest()
        yield self._object("apps/v1", "StatefulSet", spec=self._stateful_set(digest))
        if self.nodes.count:
            yield self._nodes(digest)

    def _rights(self) -> Iterator[dict[str, Any]]:
        """Yield the permissions of a coordinator that creates pods."""
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": self.name}
        yield self._object("rbac.authorization.k8s.io/v1", "Role", rules=[*RULES])
        subject = {"kind": "ServiceAccount", "name": self.name, "namespace": self.namespace}
        yield self._object("rbac.authorization.k8s.io/v1", "RoleBinding", roleRef=role, subjects=[subject])

    def _nodes(self, digest: str) -> dict[str, Any]:
        nodes = self._object(
            "apps/v1",
            "Deployment",
            spec=self.nodes.deployment(
                self.workers,
                labels=self._node_labels,
                keys=(f"{self.name}-keys", KEYS, _KEYS),
                account=self.workers.service_account or self.name,
                digest=digest,
            ),
        )
        nodes["metadata"] |= {"name": f"{self.name}-nodes", "labels": self._node_labels}
        return nodes

    def secrets(self, keys: str, connection: str) -> Iterator[dict[str, Any]]:
        """Yield the secrets that contain keys: one for the coordinator, and one for jobs in each of their namespaces.

        keys: content of the coordinator's connection file. connection: content of the jobs' file, which lacks the keys
            of services.
        """
        for name, namespace, file, content in (
            (f"{self.name}-keys", self.namespace, _KEYS, keys),
            *((f"{self.name}-jobs", one, CONNECTION, connection) for one in self._jobs_in),
        ):
            secret = self._object("v1", "Secret", type="Opaque", stringData={file: content})
            secret["metadata"] |= {"name": name, "namespace": namespace}
            yield secret

    @property
    def _jobs_in(self) -> Sequence[str]:
        return self.jobs_in or [self.namespace]

    @property
    def _labels(self) -> dict[str, str]:
        return {**LABELS, "app.kubernetes.io/name": "dpflow-head", "app.kubernetes.io/instance": self.name}

    @property
    def _node_labels(self) -> dict[str, str]:
        return {**self._labels, "app.kubernetes.io/name": "dpflow-node"}

    def _object(self, version: str, kind: str, **parts: Any) -> dict[str, Any]:
        metadata = {"name": self.name, "namespace": self.namespace, "labels": self._labels}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}

    def _settings(self) -> str:
        """Return the workers' settings that differ from the defaults, as TOML for the coordinator."""
        default = Kubernetes()
        given = replace(self.workers, namespace="", context="")
        lines = [
            f"{one.name} = {toml_of(value)}"
            for one in fields(Kubernetes)
            if (value := getattr(given, one.name)) != getattr(default, one.name)
        ]
        platform = [] if self.nodes.count else ["[platform.kubernetes]", *lines, ""]
        return "\n".join([*platform, "[autoscale]", f"hold = {toml_of(self.hold_s)}", ""])

    def _policies(self) -> Iterator[dict[str, Any]]:
        """Yield the network policies.

        Jobs reach the coordinator at any port, because its services have separate ports. Workers reach only the ports
        for workers.
        """
        jobs = [
            {**_namespace(namespace), "podSelector": {"matchLabels": {JOBS: self.name}}} for namespace in self._jobs_in
        ]
        first, last = self._worker_ports()
        ports = [{"protocol": "TCP", "port": first, "endPort": last}]
        metrics: list[dict[str, Any]] = []
        if self.metrics_to:
            port = {"protocol": "TCP", "port": METRICS_PORT}
            metrics = [{"from": [_namespace(self.metrics_to)], "ports": [port]}]
        if self.nodes.count:
            # Nodes connect to the coordinator and routers, which have separate ports.
            yield self._policy(self._labels, [{"from": jobs}, {"from": [_pods(self._node_labels)]}, *metrics])
            yield self._policy(self._node_labels, [{"from": jobs}], suffix="-nodes")
        else:
            yield self._policy(self._labels, [{"from": jobs}, {"from": [_pods(LABELS)], "ports": ports}, *metrics])
            yield self._policy(LABELS, [], suffix="-workers")

    def _policy(
        self, pods: Mapping[str, str], ingress: Sequence[Mapping[str, Any]], *, suffix: str = ""
    ) -> dict[str, Any]:
        """Return a policy that allows only connections from `ingress` to the pods with these labels."""
        spec = {**_pods(pods), "policyTypes": ["Ingress"], "ingress": [*ingress]}
        policy = self._object("networking.k8s.io/v1", "NetworkPolicy", spec=spec)
        policy["metadata"] |= {"name": f"{self.name}{suffix}"}
        return policy

    def _stateful_set(self, digest: str) -> dict[str, Any]:
        pod: dict[str, Any] = {
            "serviceAccountName": self.name,
            "automountServiceAccountToken": not self.nodes.count,
            "enableServiceLinks": False,
            # Its first process does not reap what its services leave.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": _GRACE_S,
            "securityContext": safe_pod(self.workers.user),
            "volumes": [
                # Root's, of the pod's group, and closed to others, however strict the cluster's own default is.
                {"name": "keys", "secret": {"secretName": f"{self.name}-keys", "defaultMode": 0o440}},
                {"name": "settings", "configMap": {"name": self.name}},
                {"name": "tmp", "emptyDir": {}},
            ],
            "containers": [self._container()],
        }
        if pull := self.workers.pod.get("imagePullSecrets"):
            pod["imagePullSecrets"] = pull
        annotations = {"dpflow/settings-digest": digest}
        if self.metrics_to:  # which Prometheus' usual configuration for pods looks for
            annotations |= {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
        spec: dict[str, Any] = {
            "replicas": 1,
            "serviceName": self.name,
            "selector": {"matchLabels": self._labels},
            "template": {"metadata": {"labels": self._labels, "annotations": annotations}, "spec": pod},
        }
        if self.state_size:
            claim = {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": self.state_size}},
            }
            if self.storage_class:
                claim["storageClassName"] = self.storage_class
            spec["volumeClaimTemplates"] = [
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "state"},
                    "spec": claim,
                }
            ]
        return spec

    def _container(self) -> dict[str, Any]:
        memory = str(self.memory_bytes + self.memory_bytes // 4 + _OWN_BYTES)
        mounts: list[dict[str, Any]] = [
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ]
        if self.state_size:
            mounts.append({"name": "state", "mountPath": STATE})
        ports = [{"name": "jobs", "containerPort": self.port, "protocol": "TCP"}]
        if self.metrics_to:
            ports.append({"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"})
        return {
            "name": "head",
            "image": self.workers.image,
            "command": ["python", "-m", "torch_dpflow.cli", "up"],
            "args": [
                *("--listen", f"tcp://$(POD_IP):{self.port}"),
                *("--keys", f"{KEYS}/{_KEYS}"),
                *(() if self.nodes.count else self._pods_of_workers()),
                *self.scaling,
                *("--memory", f"{self.memory_bytes}B"),
                *(("--state", f"{STATE}/flows") if self.state_size else ()),
                *(("--metrics", f"$(POD_IP):{METRICS_PORT}", "--metrics-public") if self.metrics_to else ()),
                *(("--web", f"127.0.0.1:{PAGE_PORT}") if self.page else ()),
            ],
            "env": [*self._environment()],
            "ports": ports,
            "readinessProbe": {"tcpSocket": {"port": "jobs"}},
            # A slow start makes progress; a coordinator that answers no call for five minutes does not.
            "startupProbe": {"tcpSocket": {"port": "jobs"}, "periodSeconds": 10, "failureThreshold": 180},
            "livenessProbe": {
                "exec": {"command": ["python", "-m", "torch_dpflow.cli", "status"]},
                "periodSeconds": 60,
                "timeoutSeconds": 30,
                "failureThreshold": 5,
            },
            "resources": resources_of(self.cpu, memory),
            "securityContext": SAFE_CONTAINER,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }

    def _pods_of_workers(self) -> Iterator[str]:
        yield from ("--platform", "kubernetes")
        yield from ("--worker-listen", f"tcp://$(POD_IP):{self.worker_ports}")

    def _environment(self) -> Iterator[dict[str, Any]]:
        yield field_env("POD_IP", "status.podIP")
        yield {"name": "DPFLOW_CONFIG", "value": f"{SETTINGS}/{_TOML}"}
        yield from HOME
        if self.state:
            yield {"name": "DPFLOW_STATE", "value": self.state}
        if self.state_secret:
            url = {"secretKeyRef": {"name": self.state_secret, "key": _URL}}
            yield {"name": "DPFLOW_STATE", "valueFrom": url}


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _pods(labels: Mapping[str, str]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {**labels}}}


def toml_of(value: Any) -> str:
    """Return a value as TOML writes it, on one line."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return str(value).lower()
        case Mapping():
            return "{" + ", ".join(f"{toml_of(key)} = {toml_of(inner)}" for key, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml_of, value)) + "]"
        case _:
            return str(value)
