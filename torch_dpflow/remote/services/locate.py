"""Where another process of the same node listens."""

from __future__ import annotations

import time

from torch_dpflow.errors import DeadlineError, DPFlowError
from torch_dpflow.remote.protocol import ProcessView
from torch_dpflow.remote.services.post import ClusterPlace

#: How often the node is asked, seconds.
ASK_S = 0.05


def locate(place: ClusterPlace, id: str, *, timeout_s: float = 60.0) -> str:
    """The address of the process `id`, as soon as it listens. Raises DeadlineError where it does not."""
    deadline = time.monotonic() + timeout_s
    with place.connect(place.node_address) as node:
        while time.monotonic() < deadline:
            try:
                views = node.call("processes", reply_type=list[ProcessView], timeout_s=5.0).body
            except DPFlowError:
                continue
            address = next((view.address for view in views if view.id == id), "")
            if address:
                return address
            time.sleep(ASK_S)
    raise DeadlineError(f"{id!r} does not listen after {timeout_s} s; is it desired?")
