"""Creation, listing and removal of container groups that join a cluster as nodes (Elastic Container Instance)."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.checks import check_fields, check_int, check_number, is_loopback
from torch_dpflow.errors import AnswerLostError, OptionError, ThrottledError, UnavailableError
from torch_dpflow.remote.launchers.alibaba_client import AlibabaClient, ConflictError, MissingError
from torch_dpflow.remote.launchers.contract import require
from torch_dpflow.remote.launchers.deployment import existing

#: Maximum groups on one page of a list.
PAGE = 20


@dataclass(frozen=True)
class ContainerGroup:
    """Container group, as the platform lists it: live, or ended a short time ago."""

    id: str
    name: str
    #: The platform's name of its state, such as "Running".
    status: str
    #: Its IP address in the VPC; empty: it has none yet.
    address: str
    tags: Mapping[str, str]


class ContainerGroups(AlibabaClient):
    """Client of the container groups of an account in one region. Thread-safe.

    Args:
        region: such as "cn-hangzhou".
        endpoint: address of the control plane, `http(s)://HOST[:PORT]`; empty: the region's default.

    Raises MissingExtraError: the vendor's client is not installed.
    """

    def __init__(self, region: str, endpoint: str = "") -> None:
        require("alibabacloud_eci20180808", "container groups need the vendor's client", "eci")
        super().__init__(region, endpoint, "container groups")

    @property
    def package(self) -> Any:
        import alibabacloud_eci20180808.client
        import alibabacloud_eci20180808.models

        return alibabacloud_eci20180808

    def create(self, request: Mapping[str, Any]) -> str:
        """Create a group from a request in the vendor's JSON; return the group's id.

        For a request with the ClientToken of an earlier request, the platform returns the earlier group.
        """
        given = self.package.models.CreateContainerGroupRequest().from_map({"RegionId": self.region, **request})
        what = f"{request['ContainerGroupName']} cannot be created"
        id: str = self.call(what, "create_container_group", given).body.container_group_id
        return id

    def tagged(self, key: str, value: str) -> Iterator[ContainerGroup]:
        """Yield the groups with this tag. The platform may return none if the permission to list groups is missing."""
        models, token = self.package.models, None
        while True:
            request = models.DescribeContainerGroupsRequest(
                region_id=self.region,
                tag=[models.DescribeContainerGroupsRequestTag(key=key, value=value)],
                limit=PAGE,
                next_token=token,
            )
            page = self.call("container groups cannot be listed", "describe_container_groups", request).body
            yield from map(_group, page.container_groups or [])
            token = page.next_token
            if not token:
                return

    def delete(self, id: str) -> None:
        """Request the end of a group, by force after its grace period. Raises MissingError if it does not exist."""
        request = self.package.models.DeleteContainerGroupRequest(region_id=self.region, container_group_id=id)
        self.call(f"{id} cannot be removed", "delete_container_group", request)


def _group(found: Any) -> ContainerGroup:
    tags = {tag.key: tag.value for tag in found.tags or []}
    return ContainerGroup(
        found.container_group_id, found.container_group_name, found.status, found.intranet_ip or "", tags
    )


CLUSTER, NUMBER = "dpflow-cluster", "dpflow-node"
#: States in which a group has ended for good and costs nothing.
ENDED = frozenset({"Succeeded", "Failed", "ScheduleFailed", "Expired"})
_ENDING = "Terminating"
#: Time of a leaving node, in seconds: `cluster.services.joining_node.LEAVE_S` for its jobs, and its own end.
_GRACE_S = 75
#: Maximum nodes of a cluster.
_MAX_NODES = 256
#: Maximum bytes of one file of a group.
_MAX_KEY_BYTES = 32 * 1024
#: How often a call is tried that was throttled or not answered, and the longest pause in between, in seconds.
_TRIES, _MAX_PAUSE_S = 8, 15.0
_KEYS = "/var/run/dpflow"
# A file that the platform mounts may be readable by others; a node takes keys from one that is its own only. `exec`, so
# that the node receives the signals.
_SCRIPT = (
    'umask 077 && file="$(mktemp)" && cat "$0/cluster.json" > "$file" && '
    'exec python -m torch_dpflow.cli node --join "$file" --name "$1"'
)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class NodeGroups:
    """Description of identical container groups, each of which runs one node of a cluster.

    Args:
        cluster: name of the nodes' cluster, from `cluster_of` of this module.
        address: the cluster's TCP address. count: number of groups.
        keys: content of the cluster's connection file, with the keys of services. They are never printed.
        image: image of the groups' container, in a registry that the region reaches.
        vswitch, security_group: network of the cluster and its jobs.
        cpu, memory_gib: size of each group, in processors and GiB, for all its workers and the samples of its shards.
        spot: whether the platform may end the groups at any time, for a lower price.

    Raises OptionError or OptionTypeError if a value is invalid.
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
        check_fields(self, check_int, "count", minimum=0, maximum=_MAX_NODES)
        check_fields(self, check_number, "cpu", "memory_gib", exclusive=True)
        for name in ("image", "vswitch", "security_group"):
            if not getattr(self, name):
                raise OptionError(f"no {name.replace('_', ' ')}: give --{name.replace('_', '-')}")
        _check_address(self.address)
        if len(self.keys) > _MAX_KEY_BYTES:
            raise OptionError(f"the connection file has {len(self.keys)} bytes; a group takes {_MAX_KEY_BYTES}")

    def request(self, name: str, number: str) -> dict[str, Any]:
        """Return the request for `create` of the group of node `number`. name: name and ClientToken of the group."""
        tags = {CLUSTER: self.cluster, NUMBER: number}
        # The user id has no home in the image: it would be /.
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
            # Else a node that ended because its cluster has ended would be restarted forever.
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
    """Return a cluster's name in its groups' tags: 8 hexadecimal digits. server_public: the server's public key."""
    return hashlib.sha256(server_public.encode()).hexdigest()[:8]


def deploy(groups: ContainerGroups, wanted: NodeGroups, *, dry_run: bool = False) -> Iterator[str]:
    """Create missing groups and remove surplus groups; yield each step as a line of text.

    Groups that stay are not changed; ended groups are replaced. A dry run without credentials assumes that no group
    exists.

    Raises PlatformError if the platform rejects a call, or does not answer. Repeat the call to continue.
    """
    found, unknown = existing(partial(_there, groups, wanted.cluster), dry_run=dry_run)
    yield from unknown
    there = found or ()
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
        result = f"dpf-{wanted.cluster}-node-{number}" if dry_run else f"{name} ({id})"
        yield f"{result} {would}created: {wanted.image}, {wanted.cpu:g} vCPU, {wanted.memory_gib:g} GiB"
    yield from _removed(groups, [one for one in there if one not in kept.values()], dry_run=dry_run)


def remove(groups: ContainerGroups, cluster: str, *, dry_run: bool = False) -> Iterator[str]:
    """Remove all groups of a cluster, or none in a dry run; yield each step as a line of text. Raises PlatformError."""
    there, unknown = existing(partial(_there, groups, cluster), dry_run=dry_run)
    if there is None:
        yield from unknown
        yield f"all container groups of cluster {cluster} in {groups.region} would be removed"
        return
    if not there:
        yield f"there are no container groups of cluster {cluster} in {groups.region}"
    yield from _removed(groups, there, dry_run=dry_run)


def listed(groups: ContainerGroups, cluster: str) -> Iterator[str]:
    """Yield a line of text for each group of a cluster, or one if there are none. Raises PlatformError."""
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
            # It may be removed already, if an answer was lost.
            with suppress(MissingError):
                _tried(lambda one=one: groups.delete(one.id))  # type: ignore[misc]
        yield f"{_line(one)} {'would be ' if dry_run else ''}removed"


def _line(group: ContainerGroup) -> str:
    where = f" at {group.address}" if group.address else ""
    return f"{group.name} ({group.id}) {group.status}{where}"


def _tried(call: Callable[[], _T]) -> _T:
    """Make a call with retries. This is safe: creations have a token, and an object can be removed twice."""
    backoff = Backoff(1.0, _MAX_PAUSE_S)
    while True:
        try:
            return call()
        except (ThrottledError, AnswerLostError, UnavailableError, ConflictError) as error:
            pause_s = backoff.pause_s()
            if backoff.failures >= _TRIES:
                raise
            time.sleep(max(pause_s, getattr(error, "retry_after_s", 0.0)))


def _check_address(address: str) -> None:
    is_near = is_loopback(address) or urlsplit(address).hostname in ("0.0.0.0", "::")
    if not address.startswith("tcp://") or is_near:
        raise OptionError(
            f"the cluster listens at {address}, which no other host can reach; start it with `dpflow up --listen "
            "tcp://HOST:PORT --address FILE`, of an address in the groups' network"
        )
