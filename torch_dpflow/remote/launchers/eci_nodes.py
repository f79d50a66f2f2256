"""Container groups of Elastic Container Instance that join a cluster as nodes: what they are, made, listed, removed."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.checks import check_fields, check_int, check_number
from torch_dpflow.errors import AnswerLostError, DeniedError, OptionError, ThrottledError, UnavailableError
from torch_dpflow.remote.launchers.alibaba_client import ConflictError, MissingError
from torch_dpflow.remote.launchers.eci_control import ContainerGroup, ContainerGroups

#: Tags: whose node it is, and which one.
CLUSTER, NUMBER = "dpflow-cluster", "dpflow-node"
#: States in which a group runs nothing and costs nothing, for good.
ENDED = frozenset({"Succeeded", "Failed", "ScheduleFailed", "Expired"})
_ENDING = "Terminating"
#: How long a node that leaves may take, seconds: `cluster.services.head_link.LEAVE_S` for its jobs, and its own end.
_GRACE_S = 75
#: As many as may join one cluster.
_MOST = 256
#: Bytes of one file that a group takes.
_MOST_KEYS = 32 * 1024
#: How often a call is tried that was throttled or not answered, and the longest pause in between, seconds.
_TRIES, _LONGEST_S = 8, 15.0
_KEYS = "/var/run/dpflow"
# A file that the platform mounts may be read by others; a node takes keys from one that is its own only. It then is
# the one process that is told to end.
_SCRIPT = (
    'umask 077 && file="$(mktemp)" && cat "$0/cluster.json" > "$file" && '
    'exec python -m torch_dpflow.cli node --join "$file" --name "$1"'
)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class NodeGroups:
    """So many container groups of one kind, each one node of a cluster.

    Args:
        cluster: of whose nodes they are, by `cluster_of`.
        address: where it listens, TCP.
        keys: the content of its connection file, with the keys of services. It is not printed.
        count: of groups.
        image: of their container, in a registry that the region reaches.
        vswitch, security_group: of the network in which the cluster and its jobs are.
        cpu, memory_gib: what each has, for all its workers, and for the samples that its shards keep.
        spot: whether the platform may end them at any time, for a lower price.

    Raises:
        OptionError: a value is not possible.
    """

    cluster: str
    address: str
    keys: bytes = field(repr=False)
    count: int
    image: str
    vswitch: str
    security_group: str
    cpu: float = 4.0
    memory_gib: float = 16.0
    spot: bool = False

    def __post_init__(self) -> None:
        check_fields(self, check_int, "count", minimum=0, maximum=_MOST)
        check_fields(self, check_number, "cpu", "memory_gib", exclusive=True)
        for name in ("image", "vswitch", "security_group"):
            if not getattr(self, name):
                raise OptionError(f"no {name.replace('_', ' ')}: give --{name.replace('_', '-')}")
        _check_address(self.address)
        if len(self.keys) > _MOST_KEYS:
            raise OptionError(f"the connection file has {len(self.keys)} bytes; a group takes {_MOST_KEYS}")

    def request(self, name: str, number: str) -> dict[str, Any]:
        """The group of this name, as the vendor's JSON: the name is its token too, and that of the node."""
        tags = {CLUSTER: self.cluster, NUMBER: number}
        # Of an id that the image does not know, whose home would be /.
        environment = {"HOME": "/tmp", "USER": "dpflow"}
        file = {"Path": "cluster.json", "Content": base64.b64encode(self.keys).decode()}
        return {
            "ContainerGroupName": name,
            "ClientToken": name,
            "Tag": [{"Key": key, "Value": value} for key, value in tags.items()],
            "VSwitchId": self.vswitch,
            "SecurityGroupId": self.security_group,
            "Cpu": self.cpu,
            "Memory": self.memory_gib,
            # One that has ended as its cluster is gone would be started for ever.
            "RestartPolicy": "Never",
            "TerminationGracePeriodSeconds": _GRACE_S,
            **({"SpotStrategy": "SpotAsPriceGo"} if self.spot else {}),
            "Volume": [
                {
                    "Name": "keys",
                    "Type": "ConfigFileVolume",
                    "ConfigFileVolume": {"ConfigFileToPath": [file]},
                }
            ],
            "Container": [
                {
                    "Name": "node",
                    "Image": self.image,
                    "Command": ["sh", "-c", _SCRIPT],
                    "Arg": [_KEYS, name],
                    "EnvironmentVar": [{"Key": key, "Value": value} for key, value in environment.items()],
                    "VolumeMount": [{"Name": "keys", "MountPath": _KEYS, "ReadOnly": True}],
                }
            ],
        }


def cluster_of(server_public: str) -> str:
    """The name of a cluster's groups, by its public key: 8 hexadecimal digits."""
    return hashlib.sha256(server_public.encode()).hexdigest()[:8]


def deploy(groups: ContainerGroups, wanted: NodeGroups, *, dry_run: bool = False) -> Iterator[str]:
    """Have as many groups as are wanted: make those that are missing, remove others; what is done, for people.

    A group that runs stays as it is. A dry run without the right to list groups takes none to be there.

    Raises:
        PlatformError: the platform refuses, or does not answer. What was made before stays; a further call goes on.
    """
    there: Sequence[ContainerGroup] = ()
    try:
        there = _there(groups, wanted.cluster)
    except DeniedError as error:
        if not dry_run:
            raise
        yield f"without a comparison with what is there, as it cannot be read: {error}"
    numbers = [str(number) for number in range(wanted.count)]
    kept: dict[str, ContainerGroup] = {}
    for one in there:
        number = one.tags.get(NUMBER, "")
        if one.status not in ENDED and one.status != _ENDING and number in numbers:
            kept.setdefault(number, one)
    would = "would be " if dry_run else ""
    for number in numbers:
        if number in kept:
            yield f"{_line(kept[number])} stays"
            continue
        name = f"dpf-{wanted.cluster}-node-{number}-{secrets.token_hex(4)}"
        request = wanted.request(name, number)
        id = "" if dry_run else _tried(lambda request=request: groups.create(request))  # type: ignore[misc]
        told = f"dpf-{wanted.cluster}-node-{number}" if dry_run else f"{name} ({id})"
        yield f"{told} {would}created: {wanted.image}, {wanted.cpu:g} vCPU, {wanted.memory_gib:g} GiB"
    yield from _removed(groups, [one for one in there if one not in kept.values()], dry_run=dry_run)


def remove(groups: ContainerGroups, cluster: str, *, dry_run: bool = False) -> Iterator[str]:
    """Remove all groups of a cluster, which may be gone; what is done, for people. Raises PlatformError."""
    there = _there(groups, cluster)
    if not there:
        yield f"there are no container groups of cluster {cluster} in {groups.region}"
    yield from _removed(groups, there, dry_run=dry_run)


def listed(groups: ContainerGroups, cluster: str) -> Iterator[str]:
    """The groups of a cluster, for people. Raises PlatformError."""
    there = _there(groups, cluster)
    yield from map(_line, there)
    if not there:
        yield f"there are no container groups of cluster {cluster} in {groups.region}"


def _there(groups: ContainerGroups, cluster: str) -> Sequence[ContainerGroup]:
    return _tried(lambda: [*groups.tagged(CLUSTER, cluster)])


def _removed(groups: ContainerGroups, them: Sequence[ContainerGroup], *, dry_run: bool) -> Iterator[str]:
    for one in them:
        if one.status == _ENDING:
            yield _line(one)
            continue
        if not dry_run:
            # One that is gone, as after an answer that was lost.
            with suppress(MissingError):
                _tried(lambda one=one: groups.delete(one.id))  # type: ignore[misc]
        yield f"{_line(one)} {'would be ' if dry_run else ''}removed"


def _line(group: ContainerGroup) -> str:
    where = f" at {group.address}" if group.address else ""
    return f"{group.name} ({group.id}) {group.status}{where}"


def _tried(call: Callable[[], _T]) -> _T:
    """Call again where that may help: what is created has a token, and what is removed may be so twice."""
    backoff = Backoff(1.0, _LONGEST_S)
    while True:
        try:
            return call()
        except (ThrottledError, AnswerLostError, UnavailableError, ConflictError) as error:
            pause_s = backoff.pause_s()
            if backoff.failures >= _TRIES:
                raise
            time.sleep(max(pause_s, getattr(error, "retry_after_s", 0.0)))


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    near = parts.hostname == "localhost"
    with suppress(ValueError):
        host = ipaddress.ip_address(parts.hostname or "")
        near = host.is_loopback or host.is_unspecified
    if parts.scheme != "tcp" or near:
        raise OptionError(
            f"the cluster listens at {address}, which no other host can reach; start it with `dpflow up --listen "
            "tcp://HOST:PORT --connection-file FILE`, of an address in the groups' network"
        )
