"""The workers of a loader of which the first are processes of this host and the others members of a platform."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dpflow.ipc.transport import Listener
from torch_dpflow.ipc.transport.zeromq.joined import JoinedListener
from torch_dpflow.ipc.transport.zeromq.sockets import ZeroMQListener
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.fleet.worker_record import LINE, WORK, Shell
from torch_dpflow.workers.platform import Handle


def _is_member(peer: bytes) -> bool:
    return peer.endswith((b"/" + LINE, b"/" + WORK))


class MixedWorkers:
    """Workers of two kinds, by their numbers; see `Workers` and `RemoteWorkers`. Both are closed with this.

    Args:
        local: the first.
        remote: the others.
    """

    def __init__(self, local: WorkerProcesses, remote: RemoteWorkers) -> None:
        self.local, self._remote = local, remote
        assert isinstance(local.listener, ZeroMQListener)
        assert isinstance(remote.listener, ZeroMQListener)
        self.listener: Listener = JoinedListener(local.listener, remote.listener, _is_member)
        #: Greetings of local workers, until as many are there as have to be.
        self._greetings: list[tuple[bytes, list[memoryview]]] = []

    def __len__(self) -> int:
        return len(self.local) + len(self._remote)

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

    def refusal(self, worker: int, incarnation: int) -> str:
        workers = self.local if worker < len(self.local) else self._remote
        return workers.refusal(worker, incarnation)

    def kill(self, worker: int, why: str) -> None:
        workers = self.local if worker < len(self.local) else self._remote
        workers.kill(worker, why)

    def on_message(self, peer: bytes, frames: list[memoryview]) -> None:
        """A message of a worker or member."""
        if _is_member(peer):
            self._remote.on_message(peer, frames)
        elif self._remote.awaits_more:
            self._greetings.append((peer, frames))
        else:
            self.shell.deliver(peer, frames)

    def look(self) -> None:
        """As `RemoteWorkers.look`."""
        self._remote.look()
        while self._greetings and not self._remote.awaits_more:
            self.shell.deliver(*self._greetings.pop(0))

    def dismiss(self) -> None:
        """As `RemoteWorkers.dismiss`."""
        self._remote.dismiss()

    @property
    def working(self) -> int:
        """How many members work."""
        return self._remote.working

    @property
    def limited_by(self) -> str:
        """As `RemoteWorkers.limited_by`."""
        return self._remote.limited_by

    def close(self) -> None:
        self.local.close()
        self._remote.close()
