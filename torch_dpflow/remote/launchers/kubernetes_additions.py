"""What users add to the pods of their workers: refused where it would be without effect, or break what is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_dpflow._core.checks import check_type
from torch_dpflow.errors import OptionError, OptionTypeError

#: What the specs of a pod and of its container have of ours that nothing replaces, and how it is set instead.
_POD = {
    "containers": "a worker is the only one that may keep its pod: add to it by container; others go to initContainers",
    "restartPolicy": "a worker that ends is not started again, but another one is",
    "activeDeadlineSeconds": "give lifetime",
    "serviceAccountName": "give service_account",
}
_CONTAINER = {
    "name": "its end is found by that",
    "image": "give image",
    "command": "it runs a worker",
    "args": "it runs a worker",
}
#: Fields that are lists of tables, and fields that are tables. Others are Kubernetes' to check.
_LISTS = {
    "env",
    "envFrom",
    "hostAliases",
    "imagePullSecrets",
    "initContainers",
    "ports",
    "tolerations",
    "topologySpreadConstraints",
    "volumeDevices",
    "volumeMounts",
    "volumes",
}
_TABLES = {
    "affinity",
    "dnsConfig",
    "lifecycle",
    "livenessProbe",
    "nodeSelector",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
}
#: Entries whose names tell them apart, and those that are ours already.
_NAMED: Mapping[str, set[str]] = {
    "volumes": {"launch-spec", "tmp"},
    "env": {"HOME", "USER"},
    "initContainers": {"worker"},
}


def check_pod(given: Mapping[str, Any]) -> None:
    """Check what is added to the spec of a pod. Raises OptionError and OptionTypeError, which show no values."""
    _check("pod", given, _POD)


def check_container(given: Mapping[str, Any]) -> None:
    """Check what is added to the spec of its container. Raises as `check_pod`."""
    _check("container", given, _CONTAINER)


def _check(name: str, given: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    check_type(name, given, Mapping, "a dict")
    for key, value in given.items():
        place = f"{name}[{key!r:.80}]"
        if not isinstance(key, str):
            raise OptionTypeError(f"{place}: give the name of a field as text, as Kubernetes has it")
        if key in ours:
            raise OptionError(f"{place} is set by torch_dpflow ({ours[key]}): leave it out")
        if key in _TABLES and not isinstance(value, Mapping):
            raise OptionTypeError(
                f"{place} is of type {type(value).__name__}: give a dict, as Kubernetes has it"
            )
        if key in _LISTS:
            _check_list(place, value, _NAMED.get(key))


def _check_list(place: str, value: Any, taken: set[str] | None) -> None:
    if not isinstance(value, list):
        raise OptionTypeError(
            f"{place} is of type {type(value).__name__}: give a list of dicts, which is added to ours"
        )
    for number, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise OptionTypeError(f"{place}[{number}] is of type {type(entry).__name__}: give a dict")
        if taken is None:
            continue
        if not isinstance(entry.get("name"), str) or not entry["name"]:
            raise OptionError(f"{place}[{number}] has no name: give one, as text")
        if entry["name"] in taken:
            raise OptionError(
                f"{place}[{number}] is named {entry['name']!r}, as one of torch_dpflow's: give another"
            )
