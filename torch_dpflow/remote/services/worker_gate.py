"""One socket for the workers and the jobs of a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_dpflow.remote.transport import Frame, Listener

#: Most messages of workers that are taken in before the server has its turn.
_BURST = 64


class WorkerGate:
    """A listener that keeps back the messages of workers, whose identities begin with a digit.

    Clients of an RPC server have identities that begin with another byte.

    Args:
        listener: the socket; closed with the gate.
        hear: called with each message of a worker, in the thread that receives.
    """

    def __init__(self, listener: Listener, hear: Callable[[bytes, list[memoryview]], None]) -> None:
        self._listener = listener
        self._hear = hear
        self.address = listener.address
        self.dropped = 0

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """The next message that is not a worker's; None also after messages of workers."""
        for _ in range(_BURST):
            message = self._listener.receive(timeout_s)
            self.dropped = self._listener.dropped
            if message is None or not message[0][:1].isdigit():
                return message
            self._hear(*message)
            timeout_s = 0
        return None

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """As the listener's."""
        return self._listener.send(peer, frames)

    def watch(self, descriptor: int) -> None:
        """As the listener's."""
        self._listener.watch(descriptor)

    def unwatch(self, descriptor: int) -> None:
        """As the listener's."""
        self._listener.unwatch(descriptor)

    def wake(self) -> None:
        """As the listener's."""
        self._listener.wake()

    def close(self) -> None:
        """As the listener's."""
        self._listener.close()
