"""Keeps what a node runs in step with what its coordinator desires."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from torch_dpflow.errors import DPFlowError
from torch_dpflow.remote.protocol import Desire, Launch, ProcessView
from torch_dpflow.remote.rpc import RpcClient, RpcServer
from torch_dpflow.remote.services.post import SERVICE, ServicePost, ask_in

#: How often the node is asked what runs, seconds.
ASK_S = 0.1


class Desiring(Protocol):
    """Whoever decides what is to run. Called in its server's thread, first of all with what runs."""

    def desired(self) -> list[Launch]:
        """What is to run."""

    def observe(self, processes: list[ProcessView]) -> None:
        """What runs."""


class Reconciler:
    """A thread that tells the node what is desired and the one who desires what runs, for ever."""

    def __init__(self, post: ServicePost, server: RpcServer, desiring: Desiring) -> None:
        self._post = post
        self._server = server
        self._desiring = desiring
        threading.Thread(target=self._run, name="dpflow-reconcile", daemon=True).start()

    def _run(self) -> None:
        with self._post.place.connect(self._post.place.node_address, timeout_s=10.0) as node:
            told: list[Launch] | None = None
            while True:
                try:
                    told = self._round(node, told)
                except DPFlowError as error:
                    SERVICE.warning("the node does not answer its coordinator (%s)", error)
                time.sleep(ASK_S)

    def _round(self, node: RpcClient, told: list[Launch] | None) -> list[Launch] | None:
        processes: list[ProcessView] = node.call("processes", reply_type=list[ProcessView]).body
        desired = self._ask(processes)
        if desired is not None and desired != told:
            node.call("desire", Desire(desired))
            return desired
        return told

    def _ask(self, processes: list[ProcessView]) -> list[Launch] | None:
        """Report what runs; what is desired now, None where that is not known."""

        def ask() -> list[Launch]:
            self._desiring.observe(processes)
            return self._desiring.desired()

        try:
            return ask_in(self._server, ask)
        except Exception:
            SERVICE.exception("what is to run is not known")
            return None
