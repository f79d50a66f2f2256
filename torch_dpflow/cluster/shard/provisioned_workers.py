"""Workers of a shard on the cluster's platform, which the shard requests from the provisioner.

Only the provisioner has the platform's keys. When it dies, no worker is lost: a shard names its workers before it
requests them, reports them to the next provisioner, and repeats unanswered requests.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import PeriodicCall, repeat
from torch_dpflow.cluster.messages.provisioner import (
    MAX_REQUESTS,
    Attach,
    Attached,
    Events,
    EventsRequest,
    OwnedWorker,
    RefusedStart,
    Release,
    Request,
    Requests,
    StartRequest,
    StopRequest,
    SuspectRequest,
)
from torch_dpflow.cluster.services.contents import open_content
from torch_dpflow.cluster.services.service import COORDINATOR, ServiceSpec, WorkerPlatform, run_apart
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import DPFlowError, RemoteCallError, UnavailableError
from torch_dpflow.ipc.messages.fields import MAX_TEXT
from torch_dpflow.ipc.messages.remote_worker import checked_launch_spec
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.fleet.content import SAMPLE_WORKERS, RemoteContent
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.fleet.worker_listener import PortsInUseError
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Refused
from torch_dpflow.remote.shipping.content_pack import split_content

#: Timeouts of opening the provisioner's platform, and of the call by which a shard leaves the provisioner (seconds).
OPEN_S, RELEASE_S = 120.0, 2.0


class ProvisionedPlatform:
    """`RemotePlatform` of one shard: forwards all requests to the provisioner.

    It is its own `PlatformSource`, too: the constructor waits until the provisioner has opened the platform.

    Args:
        name: name of the cluster's platform, for messages.

    Raises:
        RemoteCallError: the provisioner cannot open the platform, or refuses this shard.
        DeadlineError: the provisioner does not answer.
    """

    def __init__(self, service: ServiceSpec, name: str = "") -> None:
        self.name = name
        self._id, self._incarnation = service.id, service.incarnation
        self._client = service.place.connect(service.place.provisioner_address)
        #: Guards the attributes below.
        self._lock = threading.Lock()
        #: Requests that the provisioner has not received, by kind and worker, in order.
        self._requests: dict[tuple[type, str], Request] = {}
        #: Workers that have not ended, for the next provisioner: each a start request until it is answered, then a
        #: worker.
        self._workers: dict[str, StartRequest | OwnedWorker] = {}
        self._outcomes: list[Outcome] = []
        #: How many events the provisioner has sent. For the thread that reads them.
        self._seen = 0
        self._closed = False
        try:
            attached = self._attach()
        except BaseException:
            self._client.close()
            raise
        self.limits, self._listen_at = attached.limits, attached.listen_at
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sender = PeriodicCall(self._send, math.inf, "dpflow-requests", on_error=self._log)
        self._reader = PeriodicCall(self._read, 0.0, "dpflow-events", on_error=self._log)
        self._sender.start()
        self._reader.start()

    # -- for the shard's thread ------------------------------------------------------------------------------

    def open(self) -> ProvisionedPlatform:
        return self

    def listen_at(self) -> str:
        return self._listen_at

    def check_listen(self, address: str) -> None:
        """Do nothing, because the provisioner has checked the address."""

    def start(self, name: str, launch_spec: bytes) -> None:
        request = StartRequest(name, checked_launch_spec(name, launch_spec))
        with self._lock:
            self._workers[name] = request
        self._ask(request)

    def stop(self, name: str, why: str = "") -> None:
        self._ask(StopRequest(name, why[:MAX_TEXT]))

    def suspect(self, name: str) -> None:
        self._ask(SuspectRequest(name))

    def take(self) -> Sequence[Outcome]:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            if outcomes and not self._closed:
                os.eventfd_read(self.wakeup_fd)
            return outcomes

    def close(self, *, grace_s: float = 0.0) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._sender.stop()
        self._reader.stop()
        with suppress(DPFlowError):  # it detects the end by itself
            self._client.call("release", Release(self._id, self._incarnation, grace_s), timeout_s=RELEASE_S)
        self._client.close()
        with self._lock:
            os.close(self.wakeup_fd)

    def _ask(self, request: Request) -> None:
        with self._lock:
            self._requests[type(request), request.name] = request
        self._sender.wake()

    # -- its threads -----------------------------------------------------------------------------------------

    def _attach(self) -> Attached:
        with self._lock:
            workers = [one for one in self._workers.values() if isinstance(one, OwnedWorker)]
        body = Attach(self._id, self._incarnation, workers)
        attached: Attached = self._client.call("attach", body, reply_type=Attached, timeout_s=OPEN_S).body
        self._seen = attached.seen
        return attached

    def _send(self) -> None:
        with self._lock:
            asked = [*self._requests.items()][:MAX_REQUESTS]
        if not asked:
            return
        body = Requests(self._id, self._incarnation, [request for _, request in asked])
        if not self._client.call("request", body, reply_type=bool).body:
            return  # a new provisioner: the other thread attaches, and then the requests are repeated
        with self._lock:
            for key, request in asked:
                if self._requests.get(key) is request:
                    del self._requests[key]
        self._sender.wake()

    def _read(self) -> None:
        answer: Events = self._client.call(
            "events", EventsRequest(self._id, self._incarnation, self._seen), reply_type=Events
        ).body
        if not answer.known:
            self._attach_again()
            return
        self._seen = answer.seen
        self._add([event.outcome() if isinstance(event, RefusedStart) else event for event in answer.events])

    def _attach_again(self) -> None:
        """Attach to a new provisioner, and repeat all start requests that the previous provisioner has not answered."""
        try:
            self._attach()
        except RemoteCallError as error:  # of the platform; workers live on
            self._add([Refused(start.name, UnavailableError(str(error))) for start in self._unanswered()])
            raise
        with self._lock:
            self._requests = {(StartRequest, start.name): start for start in self._unanswered()} | self._requests
        self._sender.wake()

    def _unanswered(self) -> list[StartRequest]:
        return [one for one in [*self._workers.values()] if isinstance(one, StartRequest)]

    def _add(self, outcomes: list[Outcome]) -> None:
        with self._lock:
            for outcome in outcomes:
                self._note(outcome)
            if outcomes and not self._closed:
                if not self._outcomes:
                    os.eventfd_write(self.wakeup_fd, 1)
                self._outcomes += outcomes

    def _log(self, error: Exception) -> None:
        if not self._closed:
            SERVICE.warning("a call to the provisioner has failed and is repeated (%s)", error)

    def _note(self, outcome: Outcome) -> None:
        name = outcome.name
        match outcome:
            case Accepted(ref=ref):
                self._workers[name] = OwnedWorker(name, ref)
            case Answerless() if not isinstance(self._workers.get(name), OwnedWorker):
                self._workers[name] = OwnedWorker(name, None)
            case Refused() | Ended():
                self._workers.pop(name, None)
                self._requests.pop((StartRequest, name), None)


#: Maximum number of messages of remote workers that are handled before one of a job.
_BURST = 64
#: Timeout of sending the last messages to remote workers (seconds).
LINGER_S = 1.0
#: How long a shard waits for a free port for remote workers, and the pause between two attempts (seconds). A shard that
#: ends may hold the port for `server.LINGER_S`.
PORT_S, PORT_RETRY_S = 30.0, 1.0


class ProvisionedWorkers:
    """Workers that a platform runs for a shard, and the listener to which they connect.

    Call all methods in the shard's thread. Another thread fetches the content that workers load, and waits for the
    provisioner to open the platform, which takes seconds.
    """

    def __init__(self, service: ServiceSpec, platform: WorkerPlatform, shard: SampleShard, content: str) -> None:
        self._service = service
        self._platform = platform
        self._shard = shard
        self._digest = content
        self._remote: RemoteWorkers | None = None
        self._file: IO[bytes] | None = None
        self._ended = False
        shard.workers.use_platform(self._open)

    def close(self) -> None:
        self._ended = True
        if self._remote is not None:
            self._remote.dismiss(all_=True)
            self._remote.listener.close(linger_s=LINGER_S)
            self._remote.close()

    def status(self) -> dict[str, Any]:
        """Return the part of the shard's status that is about remote workers: values by name."""
        if self._remote is None:
            return {"remote_workers": [], "remote_worker_s": 0.0, "away_s": 0.0}
        samples = self._shard.workers.samples_of
        views = self._remote.views()
        for view in views:
            view.samples = samples(view.number) if view.state == "working" else 0
        return {
            "remote_workers": views,
            "remote_worker_s": self._remote.time.seconds,
            "away_s": self._remote.time.away_s,
            "limited_by": self._remote.limited_by,
        }

    def _serve(self) -> bool:
        """Handle messages of remote workers; return whether more may be waiting."""
        remote = self._remote
        assert remote is not None
        for _ in range(_BURST):
            remote.look()
            self._shard.workers.flush()
            if (message := remote.listener.receive(0)) is None:
                return False
            remote.on_message(*message)
        return True

    def _open(self) -> None:
        run_apart(self._shard.server.post, "dpflow-platform", self._connected, self._on_outcome)

    def _on_outcome(self, outcome: Future[RemoteWorkers]) -> None:
        error = outcome.exception()
        if error is None:
            self._begin(outcome.result())
            return
        text = f"no worker can be had of platform {self._platform.name!r} for {self._service.id}: {error}"
        if isinstance(error, PortsInUseError):
            text += (
                "; end what listens there, reduce the shards by `dpflow flow scale`, or start `dpflow up` with more "
                "ports in --worker-listen"
            )
        if not isinstance(error, DPFlowError):
            SERVICE.error("the platform could not be opened", exc_info=error)
        self._shard.workers.fail(text)

    def _connected(self) -> RemoteWorkers:
        def check(error: DPFlowError, is_late: bool) -> None:
            # The ports may be those of a shard that ends once its jobs have left it.
            if self._ended or is_late or not isinstance(error, PortsInUseError):
                raise error
            SERVICE.warning("%s; trying again", error)

        def connect() -> RemoteWorkers:
            return RemoteWorkers(
                ProvisionedPlatform(self._service, self._platform.name),
                self._content(),
                0,
                listen_at=self._platform.listen_at,
                kind=SAMPLE_WORKERS,
                cluster=self._service.place.cluster,
            )

        return repeat(connect, check, PORT_S, Backoff(PORT_RETRY_S, PORT_RETRY_S))

    def _content(self) -> RemoteContent:
        if self._file is None:
            self._file = open_content(self._service.place, self._digest, lambda: None, coordinator=COORDINATOR)
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return RemoteContent(*split_content(memoryview(mapped)))

    def _begin(self, remote: RemoteWorkers) -> None:
        self._remote = remote
        if self._ended:
            self.close()
            return
        self._shard.serve_remote(self._serve, remote)
