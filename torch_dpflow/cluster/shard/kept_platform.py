"""A cluster's platform as its shards see it: through the provisioner, which alone has its library and credentials.

It has all names before the provisioner has them, and tells them to each provisioner that begins. So a provisioner's
death costs no
member: what was asked for and not answered is asked again, and members live on.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.messages.provisioner import (
    MAX_REQUESTS,
    Asking,
    Attach,
    Attached,
    KeptMember,
    News,
    Release,
    Request,
    Requests,
    StartRequest,
    StopRequest,
    SuspectRequest,
    outcome_of,
)
from torch_dpflow.cluster.services.service import MemberPlace, ServiceSpec
from torch_dpflow.errors import DPFlowError, OptionError, RemoteCallError, UnavailableError
from torch_dpflow.ipc.messages.fields import MAX_TEXT
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Ref, Refused

#: How long the provisioner's platform may take to be opened, and the provisioner to hear that a shard ends, seconds.
OPEN_S, RELEASE_S = 120.0, 2.0


class KeptSource:
    """Where the members of a cluster's shard come from: see `PlatformSource`."""

    def __init__(self, service: ServiceSpec, place: MemberPlace) -> None:
        self._service = service
        self.name = place.name
        self._listen_at = ""

    def open(self) -> KeptPlatform:
        """Connect to the provisioner. Raises RemoteCallError with what the platform says, DeadlineError."""
        platform = KeptPlatform(self._service)
        self._listen_at = platform.listen_at
        return platform

    def listen_at(self) -> str:
        """As the provisioner says, whose host is this one."""
        return self._listen_at

    def check_listen(self, address: str) -> None:
        """Nothing: the provisioner has."""


class KeptPlatform:
    """The `RemotePlatform` of one shard.

    Raises:
        RemoteCallError: the platform cannot be opened, or refuses.
        DeadlineError: the provisioner does not answer.
    """

    def __init__(self, service: ServiceSpec) -> None:
        self._id, self._incarnation = service.id, service.incarnation
        self._client = service.place.connect(service.place.provisioner_address)
        #: Guards what follows.
        self._lock = threading.Lock()
        #: What is to be asked for, by the kind of request and the member, in order; until the provisioner has it.
        self._requests: dict[tuple[type, str], Request] = {}
        #: Orders whose start has not been answered, and how the platform knows the others that are not gone.
        self._orders: dict[str, bytes] = {}
        self._refs: dict[str, Ref | None] = {}
        self._outcomes: list[Outcome] = []
        #: How much news the provisioner has told. For the thread that asks.
        self._seen = 0
        self._closed = False
        try:
            attached = self._attach()
        except BaseException:
            self._client.close()
            raise
        self.limits, self.listen_at = attached.limits, attached.listen_at
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sender = PeriodicCall(self._send, math.inf, "dpflow-requests", on_error=self._log)
        self._reader = PeriodicCall(self._read, 0.0, "dpflow-news", on_error=self._log)
        self._sender.start()
        self._reader.start()

    # -- for the shard's thread ------------------------------------------------------------------------------

    def start(self, name: str, launch_spec: bytes) -> None:
        if len(launch_spec) > self.limits.max_launch_spec_bytes:
            raise OptionError(
                f"the launch spec of {name} has {len(launch_spec)} bytes; at most "
                f"{self.limits.max_launch_spec_bytes} are allowed"
            )
        with self._lock:
            self._orders[name] = launch_spec
        self._ask(StartRequest(name, launch_spec))

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
        with suppress(DPFlowError):  # it finds out by itself
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
            members = [KeptMember(name, ref) for name, ref in self._refs.items()]
        body = Attach(self._id, self._incarnation, members)
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
            return  # a new provisioner: the other thread attaches, and then these are asked again
        with self._lock:
            for key, request in asked:
                if self._requests.get(key) is request:
                    del self._requests[key]
        self._sender.wake()

    def _read(self) -> None:
        news: News = self._client.call(
            "news", Asking(self._id, self._incarnation, self._seen), reply_type=News
        ).body
        if not news.known:
            self._attach_again()
            return
        self._seen = news.seen
        self._tell([outcome_of(told) for told in news.told])

    def _attach_again(self) -> None:
        """To a new provisioner, and ask it for all starts that the one before has not answered."""
        try:
            self._attach()
        except RemoteCallError as error:  # what the platform says; members live on
            self._tell([Refused(name, UnavailableError(str(error))) for name in [*self._orders]])
            raise
        with self._lock:
            requests, self._requests = self._requests, {}
            for name, launch_spec in self._orders.items():
                self._requests[StartRequest, name] = StartRequest(name, launch_spec)
            self._requests |= requests
        self._sender.wake()

    def _tell(self, outcomes: list[Outcome]) -> None:
        with self._lock:
            for outcome in outcomes:
                self._note(outcome)
            if outcomes and not self._closed:
                if not self._outcomes:
                    os.eventfd_write(self.wakeup_fd, 1)
                self._outcomes += outcomes

    def _log(self, error: Exception) -> None:
        if not self._closed:
            SERVICE.warning("calling the provisioner has failed and is repeated (%s)", error)

    def _note(self, outcome: Outcome) -> None:
        name = outcome.name
        match outcome:
            case Accepted(ref=ref):
                self._orders.pop(name, None)
                self._refs[name] = ref
            case Answerless():
                self._orders.pop(name, None)
                self._refs.setdefault(name, None)
            case Refused() | Ended():
                self._orders.pop(name, None)
                self._refs.pop(name, None)
                self._requests.pop((StartRequest, name), None)
