"""Requests of a job to the coordinator for display and error messages: the flow's cost, and how its workers ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.messages.coordinator import Cost, CostRequest
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.errors import DeadlineError, PeerLostError, RemoteCallError
from torch_dpflow.ipc.rpc import RpcClient

#: Minimum time between two requests for the cost, timeout of a request, and pause after a failed request (seconds).
COST_S, COST_CALL_S, COST_PAUSE_S = 1.0, 1.0, 30.0
#: Timeout of the request for ended workers (seconds), and maximum number of ended workers in an error message.
ENDS_CALL_S, MAX_ENDS = 2.0, 3


class FlowInquiries:
    """Client that requests one flow's cost and ended workers. Its requests raise no error if they fail. Thread-safe.

    coordinator: returns the coordinator's client, or None while the coordinator does not answer.
    """

    def __init__(self, job: JobDescription, coordinator: Callable[[], RpcClient | None]) -> None:
        self._job, self._coordinator = job, coordinator
        #: Last known worker-seconds of the flow and of the job.
        self.cost = Cost(0.0, 0.0)
        self._cost_requested_at = -math.inf

    def look_at_cost(self, *, every_s: float = COST_S) -> Cost:
        """Return the last known cost. It is requested again after `every_s` seconds; later if a request failed."""
        coordinator, now = self._coordinator(), time.monotonic()
        if coordinator is not None and now - self._cost_requested_at >= every_s:
            self._cost_requested_at = now
            request = CostRequest(self._job.instance, self._job.reader)
            try:
                self.cost = coordinator.call("cost", request, reply_type=Cost, timeout_s=COST_CALL_S).body
            except (DeadlineError, PeerLostError, RemoteCallError):
                self._cost_requested_at = now + COST_PAUSE_S
        return self.cost

    def how_workers_ended(self) -> str:
        """Return a text on recent deaths of the flow's workers, for an error message; empty if none is known."""
        coordinator, mine = self._coordinator(), f"{self._job.instance}/"
        if coordinator is None:
            return ""
        try:
            views = coordinator.call("processes", reply_type=list[ProcessView], timeout_s=ENDS_CALL_S).body
        except (DeadlineError, PeerLostError, RemoteCallError):
            return ""
        ends = [view.ended for view in views if view.role == "worker" and view.id.startswith(mine) and view.ended]
        reports = [report for end in ends if (report := end.partition("\n")[2])]
        return "\n".join([end.partition("\n")[0] for end in ends[:MAX_ENDS]] + reports[:1])
