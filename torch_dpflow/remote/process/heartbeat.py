"""Heartbeats of a process to its node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch_dpflow.errors import DPFlowError
from torch_dpflow.periodic import PeriodicCall
from torch_dpflow.remote.process.spec import ServiceSpec
from torch_dpflow.remote.wire.node import Beat, Standing

#: How often a process says that it lives, seconds.
BEAT_S = 1.0
#: A process whose main thread has not come round for so long does not count as alive, seconds.
STUCK_S = 30.0


class Heartbeat:
    """A thread that tells the node that this process lives, for as long as its main thread comes round.

    A process that the node does not want any more is ended.

    Args:
        address: where the process listens; empty where it does not.
        hear: called with settings that have changed, in the heartbeat's thread.
        patience_s: how long the main thread may be away.
    """

    def __init__(
        self,
        service: ServiceSpec,
        address: str,
        *,
        hear: Callable[[bytes], None] | None = None,
        patience_s: float = STUCK_S,
    ) -> None:
        self._service = service
        self._address = address
        self._hear = hear
        self._settings = service.settings
        #: Figures for people. Replaced by the main thread, which alone may look at what it is at.
        self.status: dict[str, Any] = {}
        self._patience_s = patience_s
        self._turned = time.monotonic()
        self._node = service.place.connect(service.place.node_address)
        self._sender = PeriodicCall(self._send, BEAT_S, "dpflow-heartbeat")
        self._sender.wake()
        self._sender.start()

    def say(self, status: dict[str, Any]) -> None:
        """Tell the node of this at once. Any thread may call."""
        self.status = status
        self._sender.wake()

    def turned(self) -> None:
        """The main thread has come round."""
        self._turned = time.monotonic()

    def _send(self) -> None:
        if time.monotonic() - self._turned >= self._patience_s:
            return
        beat = Beat(self._service.id, self._service.incarnation, self._address, self.status)
        try:
            standing: Standing = self._node.call("beat", beat, reply_type=Standing, timeout_s=BEAT_S).body
        except DPFlowError:
            return  # the node is busy; where it is gone this process ends of itself
        if not standing.wanted:
            os._exit(0)
        if standing.settings != self._settings:
            self._settings = standing.settings
            if self._hear is not None:
                self._hear(standing.settings)
