"""The workers of a shard without a cluster: a test is their shard, their node, and at times one of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.shared_cluster import wait
from torch_dpflow.cluster.shard.worker_messages import DetachedPayload
from torch_dpflow.cluster.shard.workers import ShardWorkers
from torch_dpflow.ipc.transport import Listener, listen


class Workers:
    """The workers of a shard, driven by hand."""

    def __init__(
        self,
        address: str,
        *,
        task_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener: Listener = listen(address)
        #: Who is to be ended by somebody else, and what has been loaded.
        self.to_end: list[tuple[int, int]] = []
        self.loaded: dict[int, DetachedPayload] = {}
        self.shard = ShardWorkers(
            self.listener,
            "",
            1,
            lambda arrived: self.loaded.update(arrived),
            end=lambda worker, incarnation: self.to_end.append((worker, incarnation)),
            task_timeout_s=task_timeout_s,
            clock=clock,
        )

    def turn(self) -> None:
        message = self.listener.receive(0.02)
        if message is not None:
            self.shard.on_message(*message)
        self.shard.poll()
        self.shard.flush()

    def until(self, condition: Callable[[], object]) -> None:
        def holds() -> object:
            self.turn()
            return condition()

        wait(holds)
