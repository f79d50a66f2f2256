"""One socket for the workers and the jobs of a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_dpflow.remote.transport import Frame, Listener

#: Most messages of workers that are taken in before the server has its turn.
_BURST = 64


class WorkerGate:
    """A listener that keeps back the messages of workers, whose identities end with the node's token.

    What a worker says it has loaded is believed, so only who was started by the node counts as one. Everybody else is a
    client of the RPC server.

    Args:
        listener: the socket; closed with the gate.
        token: of the node.
        hear: called with each message of a worker, in the thread that receives.
    """

    def __init__(
        self, listener: Listener, token: str, hear: Callable[[bytes, list[memoryview]], None]
    ) -> None:
        self._listener = listener
        self._ending = f"/{token}".encode()
        self._hear = hear
        self.address = listener.address
        self.dropped = 0

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """The next message that is not a worker's; None also after messages of workers."""
        for _ in range(_BURST):
            message = self._listener.receive(timeout_s)
            self.dropped = self._listener.dropped
            if message is None or not message[0].endswith(self._ending):
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
