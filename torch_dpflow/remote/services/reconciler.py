"""Reconciles the processes that a node runs with those that its coordinator desires.

Nobody polls: a node answers `changes` as soon as a process has begun, ended or reported its address, else after half a
second. An idle cluster takes 6 ms of processor time a second; with polling it took 15, and each wake-up beside decoders
costs them their caches.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Protocol

from torch_dpflow.backoff import Backoff
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.process.serve import ask_in
from torch_dpflow.remote.process.spec import ServiceSpec
from torch_dpflow.remote.rpc import RpcClient, RpcServer
from torch_dpflow.remote.wire.node import Desire, Launch, ProcessView, Running


class Desiring(Protocol):
    """Decides what is to run. Called in its server's thread, `observe` first."""

    def desired(self) -> list[Launch]:
        """The processes that are to run."""

    def observe(self, processes: list[ProcessView]) -> None:
        """These processes run."""


class Reconciler:
    """Two daemon threads: one observes what the node runs, one sends it what is desired.

    The node answers the first one's call as soon as anything changes, or after half a second with fresh figures.

    Args:
        changed: set when the desired processes may have changed.
    """

    def __init__(
        self, service: ServiceSpec, server: RpcServer, desiring: Desiring, changed: threading.Event
    ) -> None:
        self._service = service
        self._server = server
        self._desiring = desiring
        self._changed = changed
        threading.Thread(target=self._observe, name="dpflow-observe", daemon=True).start()

    def _observe(self) -> None:
        seen = 0
        is_applying, backoff = False, Backoff()
        with self._connect() as node:
            while True:
                try:
                    running: Running = node.call("changes", seen, reply_type=Running).body
                    ask_in(self._server, partial(self._desiring.observe, running.processes))
                except Exception as error:
                    _log_failure(error)
                    time.sleep(backoff.pause_s())
                    continue
                backoff.reset()
                seen = running.revision
                self._changed.set()
                if not is_applying:
                    # Not earlier: a coordinator that has not observed anything desires nothing, which would end all.
                    threading.Thread(target=self._apply, name="dpflow-desire", daemon=True).start()
                    is_applying = True

    def _apply(self) -> None:
        applied: list[Launch] | None = None
        backoff = Backoff()
        with self._connect() as node:
            while True:
                self._changed.wait()
                self._changed.clear()
                try:
                    desired = ask_in(self._server, self._desiring.desired)
                    if desired != applied:
                        node.call("desire", Desire(desired))
                        applied = desired
                except Exception as error:
                    _log_failure(error)
                    time.sleep(backoff.pause_s())
                    self._changed.set()
                else:
                    backoff.reset()

    def _connect(self) -> RpcClient:
        return self._service.place.connect(self._service.place.node_address, timeout_s=10.0)


def _log_failure(error: Exception) -> None:
    if isinstance(error, DPFlowError):
        SERVICE.warning("node does not answer its coordinator (%s)", error)
    else:
        SERVICE.error("desired processes cannot be determined", exc_info=error)
