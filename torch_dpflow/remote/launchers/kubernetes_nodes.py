"""Pods that join a cluster on Kubernetes as nodes: each runs shards of flows, with their workers beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.checks import check_fields, check_int
from torch_dpflow.remote.launchers.kubernetes import Kubernetes
from torch_dpflow.remote.launchers.kubernetes_specs import SAFE_CONTAINER, check_quantity, merged, safe_pod

#: How long a node that leaves may take, seconds: `cluster.services.head_link.LEAVE_S` for its jobs, and its own end.
_GRACE_S = 75
#: As many as may join one cluster.
_MOST = 256


@dataclass(frozen=True, kw_only=True)
class NodePods:
    """So many pods of one kind.

    Args:
        count: of pods; 0: none, and the head has its workers as pods.
        cpu, memory: what each asks for, as quantities: for all its workers, and for the samples that its shards keep.

    Raises:
        OptionError: a value is not possible.
    """

    count: int = 0
    cpu: str = "4"
    memory: str = "16Gi"

    def __post_init__(self) -> None:
        check_fields(self, check_int, "count", minimum=0, maximum=_MOST)
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
        """The spec of a Deployment: pods have names of their own, so a new one waits for no name of an earlier.

        settings: image, user, and what else pods and containers of this cluster have. labels: of the pods. keys: the
        secret with the cluster's keys and address, the folder where it is mounted, its file. digest: changes with them.
        """
        secret, folder, file = keys
        pod: dict[str, Any] = {
            "serviceAccountName": account,
            "automountServiceAccountToken": bool(settings.service_account),
            "enableServiceLinks": False,
            # Somebody has to reap what its services leave, as in the head's pod.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": _GRACE_S,
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
            "env": [*_environment()],
            "resources": {
                "requests": {"cpu": self.cpu, "memory": self.memory},
                "limits": {"memory": self.memory},
            },
            "securityContext": SAFE_CONTAINER,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "keys", "mountPath": folder, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }


def _environment() -> Iterator[dict[str, Any]]:
    for name, path in (("POD_IP", "status.podIP"), ("POD_NAME", "metadata.name")):
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    # Of an id that the image does not know, whose home would be /.
    yield {"name": "HOME", "value": "/tmp"}
    yield {"name": "USER", "value": "dpflow"}
