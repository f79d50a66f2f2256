"""Finds the address of another process of the same cluster."""

from __future__ import annotations

import time

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.cluster.messages.node import Running
from torch_dpflow.cluster.services.spec import ClusterPlace
from torch_dpflow.errors import DeadlineError, DPFlowError


def locate(place: ClusterPlace, id: str, *, timeout_s: float = 60.0) -> str:
    """The address of the process `id`, as soon as it listens. Raises DeadlineError if it does not in time."""
    deadline = time.monotonic() + timeout_s
    seen, backoff = 0, Backoff()
    with place.connect(place.node_address) as node:
        while time.monotonic() < deadline:
            try:
                running: Running = node.call("changes", seen, reply_type=Running, timeout_s=5.0).body
            except DPFlowError:
                time.sleep(backoff.pause_s())
                continue
            backoff.reset()
            seen = running.revision
            own = next((view.address for view in running.processes if view.id == id), "")
            address = own or running.elsewhere.get(id, "")
            if address:
                return address
    raise DeadlineError(f"{id!r} does not listen after {timeout_s} s; is it desired?")
