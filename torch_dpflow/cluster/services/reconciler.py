"""Reconciles the processes that a node runs with those that its coordinator desires."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.messages.node import Desire, Launch, ProcessView, Running
from torch_dpflow.cluster.services.serve import ask_in
from torch_dpflow.cluster.services.spec import ServiceSpec
from torch_dpflow.ipc.rpc import RpcServer


class Reconciler:
    """Two daemon threads: one observes what the node runs, one sends it what is desired."""

    def __init__(self, service: ServiceSpec, server: RpcServer) -> None:
        self._node = service.place.connect(service.place.node_address, timeout_s=10.0)
        self._server = server
        self._observe: Callable[[list[ProcessView]], None]
        self._desired: Callable[[], list[Launch]]
        #: The latest revision of the node's processes that was observed; 0 before the first.
        self._seen = 0
        #: What the node was last sent; None before anything was.
        self._applied: list[Launch] | None = None
        # Without a pause: the node answers as soon as anything changes, or after half a second with fresh figures. An
        # idle cluster takes 6 ms of processor time a second so; with polling it took 15.
        self._observer = PeriodicCall(
            self._observe_once, 0.0, "dpflow-observe", what="observing the node's processes"
        )
        self._applier = PeriodicCall(
            self._apply, math.inf, "dpflow-desire", what="sending the node the desired processes"
        )

    def start(
        self, observe: Callable[[list[ProcessView]], None], desired: Callable[[], list[Launch]]
    ) -> None:
        """Start the threads. To be called once.

        observe: called with what runs. desired: returns what is to run. Both are called in the server's thread.
        """
        self._observe, self._desired = observe, desired
        self._observer.start()

    def changed(self) -> None:
        """The desired processes may have changed. Any thread may call."""
        self._applier.wake()

    def _observe_once(self) -> None:
        running: Running = self._node.call("changes", self._seen, reply_type=Running).body
        ask_in(self._server, partial(self._observe, running.processes))
        self._seen = running.revision
        self._applier.wake()
        # Not earlier: a coordinator that has not observed anything desires nothing, which would end all.
        if not self._applier.is_alive():
            self._applier.start()

    def _apply(self) -> None:
        desired = ask_in(self._server, self._desired)
        if desired != self._applied:
            self._node.call("desire", Desire(desired))
            self._applied = desired
