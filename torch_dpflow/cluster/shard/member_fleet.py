"""The workers of a flow's shard where a platform runs them."""

from __future__ import annotations

import mmap
import threading
import time
from typing import IO, Any

from torch_dpflow.cluster.services.contents import open_content
from torch_dpflow.cluster.services.service import COORDINATOR, MemberPlace, ServiceSpec
from torch_dpflow.cluster.shard.kept_platform import KeptSource
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.fleet.worker_listener import PortsInUseError
from torch_dpflow.remote.fleet.worker_record import SAMPLE_WORKERS, RemoteContent
from torch_dpflow.remote.shipping.content_pack import split_content

#: Most messages of members that are handled before one of a job is.
_BURST = 64
#: How long the last messages to members may take to leave, seconds.
LINGER_S = 1.0
#: For how long a port at which members may call is awaited, longer than a shard that is to end waits for its jobs; how
#: often it is tried, seconds.
PORT_S, PORT_RETRY_S = 30.0, 1.0


class MemberFleet:
    """Has a platform run the workers of a shard, and gives these what the shard's own listener would.

    All methods are for the server's thread. Another thread fetches the content and waits for the provisioner's
    platform, which takes seconds.
    """

    def __init__(self, service: ServiceSpec, members: MemberPlace, content: str) -> None:
        self._service = service
        self._members = members
        self._digest = content
        self._shard: SampleShard
        self._remote: RemoteWorkers | None = None
        self._file: IO[bytes] | None = None
        self._ended = False

    def attach(self, shard: SampleShard) -> None:
        """Serve this shard, whose thread this is. To be called once."""
        self._shard = shard
        shard.workers.use_fleet(self)
        self._open()

    def close(self) -> None:
        """End all members."""
        self._ended = True
        if self._remote is not None:
            self._remote.dismiss(all_=True)
            self._remote.listener.close(linger_s=LINGER_S)
            self._remote.close()

    def end(self, worker: int, incarnation: int) -> None:
        """Have a worker ended: see `ShardWorkers`."""
        if self._remote is not None:
            self._remote.kill(worker, "its shard has given it up; the log of the cluster says why")

    def status(self) -> dict[str, Any]:
        """Figures for people."""
        if self._remote is None:
            return {"members": [], "member_s": 0.0, "away_s": 0.0}
        samples = self._shard.workers.samples_of
        views = self._remote.views()
        for view in views:
            view.samples = samples(view.number) if view.state == "working" else 0
        return {
            "members": views,
            "member_s": self._remote.time.seconds,
            "away_s": self._remote.time.away_s,
            "limited_by": self._remote.limited_by,
        }

    # -- for the shard's workers (`WorkerFleet`) -------------------------------------------------------------

    def resize(self, workers: int) -> None:
        if self._remote is not None:
            self._remote.resize(workers)

    def rest(self) -> None:
        if self._remote is not None:
            self._remote.rest()

    def resume(self) -> None:
        if self._remote is None:
            self._open()
        else:
            self._remote.resize(self._shard.workers.expected)
            self._remote.resume()

    @property
    def shortage(self) -> tuple[str, str]:
        return ("", "") if self._remote is None else (self._remote.limited_by, self._remote.shortage)

    # -- for the remote workers (`Shell`) --------------------------------------------------------------------

    def admit(self, peer: bytes, hello: list[memoryview]) -> None:
        self._shard.workers.on_message(peer, hello)

    def deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        self._shard.workers.on_message(peer, frames)

    def drain(self) -> None:
        remote = self._remote
        while remote is not None and (message := remote.listener.receive(0)) is not None:
            remote.on_message(*message)

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        if had_tasks:
            self._shard.workers.lost(worker, how, may_blame=may_blame)
        elif how:
            SERVICE.warning("%s, before it could work", how, extra={"worker": worker})

    def set_window(self, worker: int, window: int) -> None:
        self._shard.workers.set_window(worker, window)

    def fail(self, error: Exception) -> None:
        self._shard.workers.fail(str(error))

    # -- what happens ----------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        """Handle what members have sent; whether there may be more.

        After it has returned False nothing is left that their listener's descriptors would not tell.
        """
        remote = self._remote
        assert remote is not None
        handled, before = 0, -1
        while before < handled < _BURST:
            before = handled
            remote.look()
            self._shard.workers.flush()
            # Last: to send takes the news that something has come away from the descriptors.
            while handled < _BURST and (message := remote.listener.receive(0)) is not None:
                remote.on_message(*message)
                handled += 1
        return handled >= _BURST

    def _open(self) -> None:
        threading.Thread(target=self._connect, name="dpflow-platform", daemon=True).start()

    def _connect(self) -> None:
        try:
            remote = self._connected()
        except Exception as error:
            text = f"no worker can be had of platform {self._members.name!r} for {self._service.id}: {error}"
            if isinstance(error, PortsInUseError):
                text += (
                    "; end what listens there, have fewer shards by `dpflow flow scale`, or start `dpflow up` with "
                    "more ports in --worker-listen"
                )
            if not isinstance(error, DPFlowError):
                SERVICE.exception("the platform could not be opened")
            self._shard.server.post(lambda: self._shard.workers.fail(text))
        else:
            self._shard.server.post(lambda: self._begin(remote))

    def _connected(self) -> RemoteWorkers:
        until = time.monotonic() + PORT_S
        while True:
            try:
                return RemoteWorkers(
                    KeptSource(self._service, self._members),
                    self._content(),
                    0,
                    listen_at=self._members.listen_at,
                    kind=SAMPLE_WORKERS,
                    cluster=self._service.place.cluster,
                )
            except PortsInUseError as error:  # by a shard that ends once its jobs have left it
                if self._ended or time.monotonic() >= until:
                    raise
                SERVICE.warning("%s; trying again", error)
            time.sleep(PORT_RETRY_S)

    def _content(self) -> RemoteContent:
        if self._file is None:
            self._file = open_content(
                self._service.place, self._digest, lambda: None, coordinator=COORDINATOR
            )
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return RemoteContent(*split_content(memoryview(mapped)))

    def _begin(self, remote: RemoteWorkers) -> None:
        remote.shell = self
        self._remote = remote
        if self._ended:
            self.close()
            return
        self._shard.serve_members(self._serve, remote.listener, remote.descriptors)
        remote.resize(self._shard.workers.expected)
        remote.start_all()
