"""A real server in the places of coordinator, router and shard of one flow, whose methods fail as a test says."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from torch_dpflow.cluster.messages.coordinator import Access, ContentPiece, Cost, CostRequest, FlowSpec
from torch_dpflow.cluster.messages.router import (
    DrawSamples,
    JobHeartbeatReply,
    JobId,
    Join,
    Joined,
    Route,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.cluster.messages.shard import SAMPLE, Ask, Served
from torch_dpflow.ipc.messages.headers import PayloadGroup
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcServer
from torch_dpflow.ipc.rpc.call_service import Handler
from torch_dpflow.ipc.serialization.codec import encode
from torch_dpflow.ipc.transport import listen

#: Samples of its flow.
SIZE = 6


class FailingService:
    """Coordinator, router and shard of one flow; fails over the first so many calls of a method."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.faults: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.error: Exception = KeyError("a table has no such entry")
        #: Generation of the routing table, as heartbeats are answered with it.
        self.generation = 1
        self.is_stored = True
        #: Methods that are not answered.
        self.silent: set[str] = set()
        #: The first fetch is answered once these tickets were released, whose samples take all memory.
        self.held_for: set[int] = set()
        self._waiting: list[IncomingCall] = []
        table = RoutingTable(1, [Route(0, SIZE, "shard-0", address)])
        methods: list[tuple[str, Any, Handler]] = [
            ("access", Access, lambda call: Result(address)),
            ("register", FlowSpec, lambda call: Result(self.is_stored)),
            ("store", ContentPiece, lambda call: Result(call.body.size)),
            ("join", Join, lambda call: Result(Joined(1, SIZE, table))),
            ("table", None, lambda call: Result(table)),
            ("start", StartEpoch, lambda call: None),
            ("draw", DrawSamples, self._draw),
            ("want", Ask, self._want),
            ("fetch", Ask, self._fetch),
            ("heartbeat", Any, lambda call: Result(JobHeartbeatReply(self.generation))),
            ("cost", CostRequest, lambda call: Result(Cost(0.0, 0.0))),
            ("leave", JobId, lambda call: None),
        ]
        self._server = RpcServer(listen(address))
        for name, body_type, answer in methods:
            self._server.register(name, self._failing(answer), body_type=body_type)
        self._thread = threading.Thread(target=self._server.serve)
        self._thread.start()

    def _failing(self, answer: Handler) -> Handler:
        def serve(call: IncomingCall) -> Result | Later | None:
            self.calls[call.method] += 1
            if call.method in self.silent:
                return LATER
            if self.calls[call.method] <= self.faults[call.method]:
                raise self.error
            return answer(call)

        return serve

    def _draw(self, call: IncomingCall) -> Result:
        draw: DrawSamples = call.body
        keys = np.arange(draw.position, min(SIZE, draw.position + draw.count), dtype=np.int64)
        return Result(0, [keys.tobytes()])

    def _want(self, call: IncomingCall) -> None:
        self._release(call.body)

    def _fetch(self, call: IncomingCall) -> Result | Later:
        self._release(call.body)
        tickets = {ticket for ticket, _ in call.body.awaited}
        if self.held_for - tickets and not self._waiting:
            self._waiting.append(call)
            return LATER
        return _loaded(call.body)

    def _release(self, ask: Ask) -> None:
        """A job holds these no more."""
        self.held_for.difference_update(ask.taken)
        while self._waiting and not self.held_for:
            samples = _loaded(self._waiting[0].body)
            self._waiting.pop().answer(samples.body, samples.frames)

    def close(self) -> None:
        """End the service; may be called twice."""
        self._server.stop()
        self._thread.join()
        self._server.close()


def _loaded(ask: Ask) -> Result:
    samples, frames = [], []
    for ticket, key in ask.awaited:
        table, payload = encode(key)
        samples.append(PayloadGroup([ticket], SAMPLE, table))
        frames += payload
    return Result(Served(samples), frames)
