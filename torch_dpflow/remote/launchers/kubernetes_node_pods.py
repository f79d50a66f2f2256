"""Deployment of pods that join a cluster on Kubernetes as nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.checks import check_fields, check_int
from torch_dpflow.remote.launchers.kubernetes import Kubernetes
from torch_dpflow.remote.launchers.kubernetes_specs import (
    HOME,
    SAFE_CONTAINER,
    check_quantity,
    field_env,
    merged,
    safe_pod,
)

#: Time of a leaving node, in seconds: `cluster.services.joining_node.LEAVE_S` for its jobs, and its own end.
_NODE_GRACE_S = 75
#: Maximum nodes of a cluster.
_MAX_NODES = 256


@dataclass(frozen=True, kw_only=True)
class NodePods:
    """Pods that join a cluster as nodes: each runs shards of flows and their workers.

    Args:
        count: number of pods; 0: no nodes, and each worker is a pod.
        cpu, memory: resources that each pod requests, as quantities, for all its workers and the samples of its shards.

    Raises OptionError or OptionTypeError if a value is invalid.
    """

    count: int = 0
    cpu: str = "4"
    memory: str = "16Gi"

    def __post_init__(self) -> None:
        check_fields(self, check_int, "count", minimum=0, maximum=_MAX_NODES)
        check_quantity("--node-cpu", self.cpu)
        check_quantity("--node-memory", self.memory)

    def deployment(
        self,
        settings: Kubernetes,
        *,
        labels: Mapping[str, str],
        keys: tuple[str, str, str],
        account: str,
        digest: str,
    ) -> dict[str, Any]:
        """Return the spec of the pods' Deployment.

        Args:
            settings: settings of the pods, such as the image. labels: labels of the pods.
            account: the pods' service account.
            keys: (name of the secret with the cluster's keys and address, folder where it is mounted, name of its
                file).
            digest: text that changes with the keys, so that the pods are replaced.
        """
        secret, folder, file = keys
        pod: dict[str, Any] = {
            "serviceAccountName": account,
            "automountServiceAccountToken": bool(settings.service_account),
            "enableServiceLinks": False,
            # Its first process does not reap what its services leave, as in the coordinator's pod.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": _NODE_GRACE_S,
            "securityContext": safe_pod(settings.user),
            "volumes": [
                {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {}},
            ],
            "containers": [merged(self._container(settings, folder, file), settings.container)],
        }
        if settings.node_selector:
            pod["nodeSelector"] = {**settings.node_selector}
        metadata = {"labels": {**labels}, "annotations": {"dpflow/settings-digest": digest}}
        return {
            "replicas": self.count,
            "selector": {"matchLabels": {**labels}},
            "template": {"metadata": metadata, "spec": merged(pod, settings.pod)},
        }

    def _container(self, settings: Kubernetes, folder: str, file: str) -> dict[str, Any]:
        return {
            "name": "node",
            "image": settings.image,
            "command": ["python", "-m", "torch_dpflow.cli", "node"],
            "args": [
                *("--join", f"{folder}/{file}"),
                *("--name", "$(POD_NAME)"),
                *("--listen", "$(POD_IP)"),
            ],
            "env": [field_env("POD_IP", "status.podIP"), field_env("POD_NAME", "metadata.name"), *HOME],
            "resources": resources_of(self.cpu, self.memory),
            "securityContext": SAFE_CONTAINER,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "keys", "mountPath": folder, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }


def resources_of(cpu: str, memory: str) -> dict[str, Any]:
    """Return a container's resources: it requests `cpu` and `memory`, and `memory` is also its limit."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}
