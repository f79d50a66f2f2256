"""Workers of this host and remote workers, as one set of workers of a private loader."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dpflow.ipc.transport import Frame, Listener
from torch_dpflow.ipc.transport.zeromq.joined import JoinedListener
from torch_dpflow.ipc.transport.zeromq.sockets import ZeroMQListener
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.fleet.worker_record import LINE, WORK, Shell
from torch_dpflow.workers.platform import Handle


def _is_remote(peer: bytes) -> bool:
    return peer.endswith((b"/" + LINE, b"/" + WORK))


class MixedWorkers:
    """Workers of this host, which have the lowest numbers, and remote workers. Closing this closes both."""

    def __init__(self, local: WorkerProcesses, remote: RemoteWorkers) -> None:
        self.local, self._remote = local, remote
        assert isinstance(local.listener, ZeroMQListener)
        assert isinstance(remote.listener, ZeroMQListener)
        self.listener: Listener = JoinedListener(local.listener, remote.listener, _is_remote)
        #: Handshakes of local workers, held back until the minimum of remote workers is connected.
        self._held_back: list[tuple[bytes, list[memoryview]]] = []

    def __len__(self) -> int:
        return len(self.local) + len(self._remote)

    @property
    def sender(self) -> MixedWorkers:
        """Sends the shard's messages."""
        return self

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """As `Listener.send`."""
        return self._remote.send(peer, frames) if _is_remote(peer) else self.local.listener.send(peer, frames)

    @property
    def shell(self) -> Shell:
        """The shard."""
        return self._remote.shell

    @shell.setter
    def shell(self, shell: Shell) -> None:
        self._remote.shell = shell

    def start_all(self) -> None:
        self.local.start_all()
        self._remote.start_all()

    def ended(self) -> Sequence[tuple[int, Handle]]:
        return self.local.ended()

    def _with(self, worker: int) -> WorkerProcesses | RemoteWorkers:
        return self.local if worker < len(self.local) else self._remote

    def refusal(self, worker: int, incarnation: int) -> str:
        return self._with(worker).refusal(worker, incarnation)

    def kill(self, worker: int, why: str) -> None:
        self._with(worker).kill(worker, why)

    def on_message(self, peer: bytes, frames: list[memoryview]) -> None:
        if _is_remote(peer):
            self._remote.on_message(peer, frames)
        elif self._remote.awaits_more:
            self._held_back.append((peer, frames))
        else:
            self.shell.deliver(peer, frames)

    def look(self) -> None:
        self._remote.look()
        while self._held_back and not self._remote.awaits_more:
            self.shell.deliver(*self._held_back.pop(0))

    def dismiss(self) -> None:
        self._remote.dismiss()

    @property
    def working(self) -> int:
        return self._remote.working

    @property
    def limited_by(self) -> str:
        return self._remote.limited_by

    def close(self) -> None:
        self.local.close()
        self._remote.close()
