"""One socket for the workers and the jobs of a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_dpflow.ipc.transport import Frame, Listener

#: Most messages of workers that are handled before the server handles another one.
_BURST = 64


class WorkerDemultiplexer:
    """A listener that handles the messages of workers itself and returns all others.

    A worker's identity ends with the node's token. What a worker reports as loaded is believed, so only a process that
    the node has started counts as one; everybody else is a client of the RPC server.

    Args:
        listener: the socket; closed with the demultiplexer.
        token: of the node.
        on_worker_message: called with each message of a worker, in the thread that receives.
    """

    losses = 0
    #: Receives what members of a platform have sent to their own listener; whether there may be more. None: there is no
    #: such listener.
    serve_members: Callable[[], bool] | None = None

    def __init__(
        self, listener: Listener, token: str, on_worker_message: Callable[[bytes, list[memoryview]], None]
    ) -> None:
        self._listener = listener
        self._suffix = f"/{token}".encode()
        self._on_worker_message = on_worker_message
        self.address = listener.address
        self.dropped = 0

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """The next message that is not a worker's; None also after messages of workers."""
        if self.serve_members is not None and self.serve_members():
            timeout_s = 0
        for _ in range(_BURST):
            message = self._listener.receive(timeout_s)
            self.dropped = self._listener.dropped
            if message is None or not message[0].endswith(self._suffix):
                return message
            self._on_worker_message(*message)
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
