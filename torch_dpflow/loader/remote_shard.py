"""A private shard whose workers, or the last of them, a platform runs elsewhere."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

from torch_dpflow.loader.loader_limit import LoaderLimit
from torch_dpflow.loader.mixed_workers import MixedWorkers
from torch_dpflow.loader.private_shard import GRACE_S, PrivateShard
from torch_dpflow.loader.shard_events import Broken, MemberLost
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.fleet.worker_record import BATCH_WORKERS


class RemoteShard(PrivateShard):
    """As `PrivateShard`; its thread starts and replaces members by itself."""

    ticks = True
    most_window = BATCH_WORKERS.most_window

    def __init__(
        self, processes: RemoteWorkers | MixedWorkers, *, limit: LoaderLimit, **arguments: Any
    ) -> None:
        self._members, self._limit = processes, limit
        processes.shell = self
        super().__init__(processes, **arguments)
        # Before the platform's library leaves, which was imported before: the library would take the members with it.
        atexit.register(self.close)

    def close(self, *, grace_s: float = GRACE_S) -> None:
        super().close(grace_s=grace_s)
        if threading.current_thread() is not self._thread:
            atexit.unregister(self.close)

    def elsewhere(self) -> tuple[int, str]:
        return self._members.working, self._members.limited_by

    # -- for the workers (`Shell`) -----------------------------------------------------------------------

    def admit(self, peer: bytes, hello: list[memoryview]) -> None:
        self._shard.on_message(peer, hello)

    def deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        self._shard.on_message(peer, frames)

    def drain(self) -> None:
        self._drain()

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        if had_tasks:
            self._lose(worker, MemberLost(worker, how), may_blame=may_blame)
        else:
            self._notify(MemberLost(worker, how))

    def set_window(self, worker: int, window: int) -> None:
        self._shard.set_window(worker, window)

    def fail(self, error: Exception) -> None:
        self._notify(Broken(error))

    # -- the shard's thread ------------------------------------------------------------------------------

    def _receiver(self) -> Callable[[bytes, list[memoryview]], None]:
        return self._members.on_message

    def _poll_once(self) -> None:
        super()._poll_once()
        self._members.look()  # a message may be of a member that can work now
        self._limit.look(self._scheduler, self._clock())

    def _shut_down(self) -> None:
        """Stop the workers and wait for those that work to say goodbye; the platform ends the others."""
        self._shard.stop_workers()
        self._members.dismiss()
        local = self._members.local
        leaving = (
            set() if local is None else {number for number in self._shard.connected if number < len(local)}
        )
        deadline = time.monotonic() + self._grace_s
        while (leaving or self._members.working) and (left_s := deadline - time.monotonic()) > 0:
            message = self._listener.receive(left_s)
            if message is not None:
                self._receive(*message)
            leaving.difference_update(worker for worker, _ in self._members.ended())
        self._listener.close()
