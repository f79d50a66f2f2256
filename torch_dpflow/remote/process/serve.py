"""The main loop of a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch_dpflow.remote.process.heartbeat import Heartbeat
from torch_dpflow.remote.process.spec import ServiceSpec
from torch_dpflow.remote.rpc import RpcServer

T = TypeVar("T")
#: How long a server waits for a message before it looks at what else is due, seconds.
TURN_S = 0.1
#: How old the figures may be that it has for people, seconds: to gather them costs more than a turn.
STATUS_S = 0.5


def serve(
    service: ServiceSpec,
    server: RpcServer,
    status: Callable[[], dict[str, Any]],
    turn: Callable[[], None],
    *,
    settle: Callable[[bytes], None] | None = None,
    turn_s: float = TURN_S,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Serve until the process ends.

    turn: called between messages, at least every `turn_s` seconds. settle: called with settings that have changed.
    Both in this thread, as `status`, whose figures are for people. heartbeat: of a process that has one already.
    """

    def hear(settings: bytes) -> None:
        if settle is not None:
            server.post(lambda: settle(settings))

    heartbeat = heartbeat or Heartbeat(service, server.address, hear=hear)
    due = status_due = 0.0
    while True:
        server.step(turn_s)
        now = time.monotonic()
        if now >= due:
            due = now + turn_s
            heartbeat.turned()
            turn()
        if now >= status_due:
            status_due = now + STATUS_S
            stats = server.stats()
            heartbeat.status = {**status(), "malformed": stats.malformed, "strangers": stats.strangers}


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
