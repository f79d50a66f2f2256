"""The main loop of a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from torch_dpflow.cluster.services.heartbeat import HeartbeatSender
from torch_dpflow.cluster.services.spec import ServiceSpec
from torch_dpflow.ipc.rpc import RpcServer

T = TypeVar("T")
#: How long a server waits for a message before it polls, seconds.
POLL_S = 0.1
#: How often its status is gathered, seconds: that costs more than polling.
STATUS_S = 0.5


def serve(
    service: ServiceSpec,
    server: RpcServer,
    *,
    status: Callable[[], dict[str, Any]] = dict,
    poll: Callable[[], None] = lambda: None,
    apply_settings: Callable[[bytes], None] = lambda _: None,
    poll_s: float = POLL_S,
    leave: Callable[[], None] = lambda: None,
    heartbeats: HeartbeatSender | None = None,
) -> None:
    """Serve until the process ends. All functions but `leave` are called in this thread.

    status: returns figures for people.
    poll: called between messages, at least every `poll_s` seconds.
    apply_settings: called with settings that have changed.
    leave: as of `HeartbeatSender`.
    heartbeats: of a process that sends some already.
    """
    heartbeats = heartbeats or HeartbeatSender(
        service,
        server.address,
        apply_settings=lambda settings: server.post(partial(apply_settings, settings)),
        leave=leave,
    )
    due = status_due = 0.0
    while True:
        server.step(poll_s)
        now = time.monotonic()
        if now >= due:
            due = now + poll_s
            heartbeats.on_iteration()
            poll()
        if now >= status_due:
            status_due = now + STATUS_S
            stats = server.stats()
            heartbeats.status = {**status(), "malformed": stats.malformed, "strangers": stats.strangers}


def ask_in(server: RpcServer, question: Callable[[], T]) -> T:
    """What `question` returns, called in the server's thread, while this one waits. Raises what it raises."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    server.post(ask)
    return answer.result()
