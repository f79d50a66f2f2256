"""Keeps what a node runs in step with what its coordinator desires."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Protocol

from torch_dpflow.errors import DPFlowError
from torch_dpflow.remote.process.spec import SERVICE, ServicePost, ask_in
from torch_dpflow.remote.rpc import RpcClient, RpcServer
from torch_dpflow.remote.wire.node import Desire, Launch, ProcessView, Running

#: How long to wait after something has failed, seconds.
PAUSE_S = 0.1


class Desiring(Protocol):
    """Whoever decides what is to run. Called in its server's thread, first of all with what runs."""

    def desired(self) -> list[Launch]:
        """What is to run."""

    def observe(self, processes: list[ProcessView]) -> None:
        """What runs."""


class Reconciler:
    """Two threads, for ever: one hears from the node what runs, one tells it what is desired.

    Any change of what runs is heard at once; where there is none, figures are heard of now and then.

    Args:
        changed: set when something else may be desired than before.
    """

    def __init__(
        self, post: ServicePost, server: RpcServer, desiring: Desiring, changed: threading.Event
    ) -> None:
        self._post = post
        self._server = server
        self._desiring = desiring
        self._changed = changed
        threading.Thread(target=self._hear, name="dpflow-hear", daemon=True).start()

    def _hear(self) -> None:
        seen = 0
        telling = False
        with self._connect() as node:
            while True:
                try:
                    running: Running = node.call("changes", seen, reply_type=Running).body
                    ask_in(self._server, partial(self._desiring.observe, running.processes))
                except Exception as error:
                    _complain(error)
                    time.sleep(PAUSE_S)
                    continue
                seen = running.revision
                self._changed.set()
                if not telling:
                    # Not before: what a coordinator desires that does not know yet what runs would end all of it.
                    threading.Thread(target=self._tell, name="dpflow-tell", daemon=True).start()
                    telling = True

    def _tell(self) -> None:
        told: list[Launch] | None = None
        with self._connect() as node:
            while True:
                self._changed.wait()
                self._changed.clear()
                try:
                    desired = ask_in(self._server, self._desiring.desired)
                    if desired != told:
                        node.call("desire", Desire(desired))
                        told = desired
                except Exception as error:
                    _complain(error)
                    time.sleep(PAUSE_S)
                    self._changed.set()

    def _connect(self) -> RpcClient:
        return self._post.place.connect(self._post.place.node_address, timeout_s=10.0)


def _complain(error: Exception) -> None:
    if isinstance(error, DPFlowError):
        SERVICE.warning("the node does not answer its coordinator (%s)", error)
    else:
        SERVICE.error("what is to run is not known", exc_info=error)
