"""Parts that the specs of all our pods share, checks of users' additions, and translation of a pod's status."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch_dpflow._core.checks import check_type
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.remote.launchers.contract import Fate
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End

#: The labels of all workers, also as a selector, and the name of the label with the fleet's name.
LABELS = {"app.kubernetes.io/name": "dpflow-worker", "app.kubernetes.io/managed-by": "torch_dpflow"}
SELECTOR = ",".join(f"{key}={value}" for key, value in LABELS.items())
FLEET = "app.kubernetes.io/instance"
#: Permissions that a process needs to start workers in a namespace, as rules of a Role.
RULES: Sequence[Mapping[str, Any]] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
)
#: Time that a pod has to exit if Kubernetes or a user ends it; interval between checks of all workers; in seconds.
GRACE_S, SWEEP_S = 30.0, 5.0
#: Reasons for which a container waits and that usually do not pass by themselves; its worker counts as ended.
STUCK = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)
_WHY = ("reason", "message")
_QUANTITY = re.compile(r"\d{1,15}(\.\d{1,9})?(m|k|M|G|T|P|E|[KMGTPE]i)?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
#: After how long a pod that has ended counts as abandoned, and the longest wait for a start, in seconds. The process
#: that started a pod reads its end within `SWEEP_S`.
ENDED_S, START_S = 60.0, 600.0
#: What Kubernetes' strictest standard requires of a container, and a read-only root.
SAFE_CONTAINER: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


#: Environment of our containers: their user has no home in the image.
HOME = ({"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "dpflow"})


def field_env(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def check_quantity(name: str, text: str, *, zero: bool = False) -> None:
    """Raise OptionError if `text` is no quantity in Kubernetes' format. zero: whether 0 (no bound) is allowed."""
    if not _QUANTITY.fullmatch(text) or not (zero or re.search(r"[1-9]", text)):
        raise OptionError(f"{name}={text!r:.80}: give a quantity{'' if zero else ' above 0'}, as '500m' or '2Gi'")


def check_label(
    name: str, text: str, *, longest: int = 63, dots: bool = False, begins_with_letter: bool = False
) -> None:
    """Raise OptionError if `text` cannot name a Kubernetes object. dots: whether it may contain dots."""
    parts = text.split(".") if dots else [text]
    good = len(text) <= longest and all(map(_LABEL.fullmatch, parts))
    if not good or (begins_with_letter and not text[0].isalpha()):
        raise OptionError(
            f"{name}={text!r:.80}: give at most {longest} small letters, digits{', dots' if dots else ''} and hyphens, "
            f"beginning with a letter{'' if begins_with_letter else ' or digit'} and ending with a letter or digit"
        )


def safe_pod(user: int) -> dict[str, Any]:
    """Return a pod's security context for Kubernetes' restricted standard. user: id of the pod's user and group.

    The group can read the pod's secrets, which belong to root.
    """
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def labels_of(name: str) -> dict[str, str]:
    return {**LABELS, FLEET: name.rsplit("-", 2)[0]}


def merged(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ours` with the additions `given`: mappings are merged, lists are joined, other values are replaced."""
    both = {**ours}
    for key, value in given.items():
        there = both.get(key)
        if isinstance(there, Mapping) and isinstance(value, Mapping):
            both[key] = merged(there, value)
        elif isinstance(there, list) and isinstance(value, list):
            both[key] = [*there, *value]
        else:
            both[key] = value
    return both


def fate_of(pod: Mapping[str, Any]) -> Fate:
    status = pod.get("status", {})
    named = [one for one in status.get("containerStatuses", []) if one.get("name") == "worker"]
    state = named[0].get("state", {}) if named else {}
    place = f"pod {pod['metadata']['name']} on {pod.get('spec', {}).get('nodeName') or 'no node'}"
    if status.get("phase") in ("Succeeded", "Failed"):
        ended = state.get("terminated") or {}
        code = ended.get("exitCode")
        result = [*(status.get(key) for key in _WHY), *(ended.get(key) for key in _WHY if code)]
        signal = code - 128 if code is not None and code > 128 else None
        report = "\n".join(filter(None, result))[-MAX_REPORT_CHARS:]
        return Fate(end=End(code=None if signal else code, signal=signal, report=report, place=place))
    waiting = state.get("waiting") or {}
    if waiting.get("reason") in STUCK:
        report = f"{waiting['reason']}: {waiting.get('message', '')}"[:MAX_REPORT_CHARS]
        return Fate(end=End(report=report, place=place))
    if pod["metadata"].get("deletionTimestamp"):
        # Since the last look; the time itself is of another clock.
        return Fate(until_s=max(0.0, float(pod["metadata"].get("deletionGracePeriodSeconds") or 0.0) - SWEEP_S))
    return Fate()


def is_left(pod: Mapping[str, Any], now: float) -> bool:
    """Return whether a pod counts as left behind by a killed process: it ended a while ago, or waits too long to start.

    now: seconds since 1970. If the cluster's clock differs, a pod stays longer, or its last output is lost.
    """
    status = pod.get("status", {})
    ends = [one.get("state", {}).get("terminated") or {} for one in status.get("containerStatuses", [])]
    times = [pod["metadata"].get("creationTimestamp"), *(end.get("finishedAt") for end in ends)]
    latest = max((_seconds(text) for text in times if text), default=now)
    timeout_s = {"Pending": 1.5 * START_S, "Succeeded": ENDED_S, "Failed": ENDED_S}.get(status.get("phase", ""))
    return timeout_s is not None and now - latest > timeout_s


def _seconds(text: str) -> float:
    """Return a time in Kubernetes' format as seconds since 1970; infinite if malformed."""
    with suppress(ValueError):
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    return float("inf")


#: Fields of a pod and of its container that nothing replaces, and how they are set instead.
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
#: Fields that are lists of tables, and fields that are tables. Kubernetes checks all others.
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
#: Lists whose entries have names, and our own names in them.
_NAMED: Mapping[str, set[str]] = {
    "volumes": {"launch-spec", "tmp"},
    "env": {"HOME", "USER"},
    "initContainers": {"worker"},
}


def check_pod(given: Mapping[str, Any]) -> None:
    """Check additions to the spec of a pod. Raises OptionError or OptionTypeError, whose texts contain no values."""
    _check("pod", given, _POD)


def check_container(given: Mapping[str, Any]) -> None:
    """Check additions to the spec of a pod's container. Raises the errors of `check_pod`."""
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
            raise OptionTypeError(f"{place} is of type {type(value).__name__}: give a dict, as Kubernetes has it")
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
            raise OptionError(f"{place}[{number}] is named {entry['name']!r}, as one of torch_dpflow's: give another")
