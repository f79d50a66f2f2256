"""The control plane of Elastic Container Instance, by the vendor's client: only this module imports it, and late."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_dpflow.errors import MissingExtraError
from torch_dpflow.remote.launchers.alibaba_client import AlibabaClient

_LIBRARY = "alibabacloud_eci20180808"
_NOT_INSTALLED = "container groups need the vendor's client; install it with: pip install 'torch_dpflow[eci]'"
#: Groups on one page of a list: as many as there may be.
PAGE = 20


@dataclass(frozen=True)
class ContainerGroup:
    """A group that is there, or has ended within the last hour."""

    id: str
    name: str
    #: As the platform has it, such as "Running".
    status: str
    #: In the network that it is in; empty: it has none yet.
    address: str
    tags: Mapping[str, str]


class ContainerGroups(AlibabaClient):
    """The container groups of an account in one region. Any thread may call.

    Args:
        region: as "cn-hangzhou".
        endpoint: `http(s)://HOST[:PORT]` of the control plane; empty: the region's.

    Raises:
        MissingExtraError: the vendor's client is not installed.
    """

    def __init__(self, region: str, endpoint: str = "") -> None:
        if importlib.util.find_spec(_LIBRARY) is None:
            raise MissingExtraError(_NOT_INSTALLED)
        super().__init__(region, endpoint, "container groups")

    def make(self, config: Any) -> Any:
        from alibabacloud_eci20180808.client import Client

        return Client(config)

    def create(self, request: Mapping[str, Any]) -> str:
        """Create a group by the vendor's JSON, which has a ClientToken; its id. The same token gives the same group."""
        from alibabacloud_eci20180808.models import CreateContainerGroupRequest

        given = CreateContainerGroupRequest().from_map({"RegionId": self.region, **request})
        what = f"{request['ContainerGroupName']} cannot be created"
        id: str = self.call(what, "create_container_group", given).body.container_group_id
        return id

    def tagged(self, key: str, value: str) -> Iterator[ContainerGroup]:
        """The groups with this tag. An account that lacks the right to list is told of none."""
        from alibabacloud_eci20180808.models import (
            DescribeContainerGroupsRequest,
            DescribeContainerGroupsRequestTag,
        )

        token = None
        while True:
            request = DescribeContainerGroupsRequest(
                region_id=self.region,
                tag=[DescribeContainerGroupsRequestTag(key=key, value=value)],
                limit=PAGE,
                next_token=token,
            )
            page = self.call("container groups cannot be listed", "describe_container_groups", request).body
            yield from map(_group, page.container_groups or [])
            token = page.next_token
            if not token:
                return

    def delete(self, id: str) -> None:
        """End a group: it is told to, and killed after its grace. Raises MissingError if there is none."""
        from alibabacloud_eci20180808.models import DeleteContainerGroupRequest

        request = DeleteContainerGroupRequest(region_id=self.region, container_group_id=id)
        self.call(f"{id} cannot be removed", "delete_container_group", request)


def _group(found: Any) -> ContainerGroup:
    tags = {tag.key: tag.value for tag in found.tags or []}
    return ContainerGroup(
        found.container_group_id, found.container_group_name, found.status, found.intranet_ip or "", tags
    )
