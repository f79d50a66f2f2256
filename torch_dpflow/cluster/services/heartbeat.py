"""Heartbeats of a process to its node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.messages.node import Heartbeat, HeartbeatReply
from torch_dpflow.cluster.services.spec import ServiceSpec
from torch_dpflow.errors import DPFlowError

#: The interval between heartbeats, seconds.
HEARTBEAT_S = 1.0
#: A process sends no heartbeats once an iteration of its main loop takes longer, seconds.
STUCK_S = 30.0


class HeartbeatSender:
    """A thread that sends heartbeats to the node, and ends this process once the node does not desire it.

    Args:
        address: where the process listens; empty where it does not.
        apply_settings: called with settings that have changed, in this thread.
        status: figures for people, until there are others.
        leave: called before this process ends because the node does not desire it, in this thread.
        stuck_s: no heartbeat is sent once an iteration of the main loop takes longer, seconds.
    """

    def __init__(
        self,
        service: ServiceSpec,
        address: str,
        *,
        apply_settings: Callable[[bytes], None] = lambda _: None,
        status: dict[str, Any] | None = None,
        leave: Callable[[], None] = lambda: None,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._leave = leave
        self._service = service
        self._address = address
        self._apply_settings = apply_settings
        self._settings = service.settings
        #: Figures for people. Replaced by the main thread, which alone may read what they are gathered from.
        self.status = status or {}
        self._stuck_s = stuck_s
        self._iterated_at = time.monotonic()
        self._node = service.place.connect(service.place.node_address)
        self._thread = PeriodicCall(
            self._send, HEARTBEAT_S, "dpflow-heartbeat", what="the heartbeat to the node"
        )
        self._thread.wake()
        self._thread.start()

    def report(self, status: dict[str, Any]) -> None:
        """Send this status at once. Any thread may call."""
        self.status = status
        self._thread.wake()

    def on_iteration(self) -> None:
        """The main loop has completed an iteration."""
        self._iterated_at = time.monotonic()

    def _send(self) -> None:
        if time.monotonic() - self._iterated_at >= self._stuck_s:
            return
        heartbeat = Heartbeat(self._service.id, self._service.incarnation, self._address, self.status)
        try:
            reply: HeartbeatReply = self._node.call(
                "heartbeat", heartbeat, reply_type=HeartbeatReply, timeout_s=HEARTBEAT_S
            ).body
        except DPFlowError:
            return  # the node is busy; if it has ended, this process ends without its help
        if not reply.desired:
            self._leave()
            os._exit(0)
        if reply.settings != self._settings:
            self._settings = reply.settings
            self._apply_settings(reply.settings)
