"""Provisioner of a cluster's workers on a platform: the only process with the platform's library and credentials.

It starts, watches and ends workers as shards request. Each shard has the keys and connections of its own workers, so
workers survive the death of the provisioner. The provisioner saves no state: see `cluster.control.worker_owners`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_dpflow._core.threads import PeriodicCall, SuspendAwareClock
from torch_dpflow.cluster.control.worker_owners import WorkerOwners
from torch_dpflow.cluster.messages.provisioner import (
    Attach,
    Attached,
    Events,
    EventsRequest,
    RefusedStart,
    Release,
    Requests,
    StartRequest,
    StopRequest,
    SuspectRequest,
)
from torch_dpflow.cluster.services.service import ServiceSpec, WorkerPlatform, ask_in, run_apart, serve
from torch_dpflow.errors import DeniedError, DPFlowError, OptionError, RejectedError, UsageError
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcServer, ServerOptions
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import (
    Accepted,
    AdoptingPlatform,
    Launcher,
    PlatformSpec,
    Ref,
    Refused,
    prefix_of,
)

#: How long a call of `events` waits for an event (seconds).
HOLD_S = 1.0
#: When a new provisioner first looks for workers that no shard owns (seconds after its start; all shards have attached
#: by then), and the interval at which it looks again (seconds).
FIRST_SWEEP_S, SWEEP_S = 15.0, 60.0
#: How long workers may take to end by themselves when the cluster ends (seconds).
GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Platform that a provisioner has opened."""

    platform: AdoptingPlatform
    launcher: Launcher
    #: Address at which shards should listen for the platform's workers.
    listen_at: str
    #: The cluster's workers that the platform listed when it was opened, by name; empty if they cannot be listed.
    found: Mapping[str, Ref]


class Provisioner:
    """Provisioner that serves the shards of a cluster. One thread drives it; only `close` blocks.

    Args:
        server: server at which the methods are registered; the caller runs it.
        spec: settings of the platform.
        place: address at which shards listen for workers, and maximum number of workers.
        prefix: prefix of the names of the cluster's workers.
        on_opened: called in the server's thread once the platform is open.
    """

    def __init__(
        self,
        server: RpcServer,
        spec: PlatformSpec,
        place: WorkerPlatform,
        prefix: str,
        *,
        clock: Callable[[], float],
        on_opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = server
        self._spec = spec
        self._place = place
        self._prefix = prefix
        self._clock = clock
        self._on_open = on_opened
        self._owners = WorkerOwners(prefix, place.max_workers)
        self._opened: Opened | None = None
        self._opens = False
        #: Why the platform refuses workers, if waiting does not help; otherwise empty.
        self._refusal = ""
        #: Calls that wait for the platform, and calls of `events` with their deadlines.
        self._attaching: list[IncomingCall] = []
        self._watching: list[tuple[float, IncomingCall]] = []
        self._sweep_at = clock() + FIRST_SWEEP_S
        server.register("attach", self._on_attach, body_type=Attach)
        server.register("request", self._on_request, body_type=Requests)
        server.register("events", self._on_events, body_type=EventsRequest)
        server.register("release", self._on_release, body_type=Release)

    def poll(self) -> None:
        """End workers that no shard owns any more, and answer calls at their deadlines.

        Call this in the server's thread.
        """
        now = self._clock()
        if self._opened is not None:
            for name in self._owners.to_end(now):
                self._opened.platform.stop(name, "its shard has ended")
            if now >= self._sweep_at:
                self._sweep_at = now + SWEEP_S
                list_ = partial(self._listed, self._opened.launcher)
                run_apart(self._server.post, "dpflow-sweep", list_, self._end_strays)
        self._answer_watching()

    def status(self) -> dict[str, Any]:
        return {
            "platform": self._spec.name,
            "kept": len(self._owners),
            "most": self._owners.most,
            "refusal": self._refusal,
        }

    def close(self) -> None:
        """End all workers, by force if they still run after `GRACE_S` seconds. Blocks. Any thread may call."""
        if self._opened is not None:
            self._opened.platform.close(grace_s=GRACE_S)

    # -- calls -----------------------------------------------------------------------------------------------

    def _on_attach(self, call: IncomingCall) -> Later:
        self._attaching.append(call)
        if self._opened is not None:
            self._attach_all()
        elif not self._opens:
            self.open()
        return LATER

    def _attach_all(self) -> None:
        assert self._opened is not None
        attaching, self._attaching = self._attaching, []
        for call in attaching:
            try:
                call.answer(self._attach(call.body, self._opened))
            except DPFlowError as error:
                call.fail(error)

    def _attach(self, attach: Attach, opened: Opened) -> Attached:
        names = [worker.name for worker in attach.workers]
        seen = self._owners.attach(attach.shard, attach.incarnation, names, self._clock())
        for worker in attach.workers:
            opened.platform.adopt(worker.name, worker.ref or opened.found.get(worker.name))
        SERVICE.info("shard %s has %d workers on platform %s", attach.shard, len(names), self._spec.name)
        return Attached(opened.platform.limits, opened.listen_at, seen)

    def _on_request(self, call: IncomingCall) -> Result:
        sent: Requests = call.body
        if self._opened is None or not self._owners.hears(sent.shard, sent.incarnation, self._clock()):
            return Result(False)
        platform = self._opened.platform
        for request in sent.requests:
            match request:
                case StartRequest():
                    self._start(sent.shard, request, self._opened)
                case StopRequest(name, why) if self._owners.has(sent.shard, name):
                    platform.stop(name, why)
                case SuspectRequest(name) if self._owners.has(sent.shard, name):
                    platform.suspect(name)
        self._answer_watching()
        return Result(True)

    def _start(self, shard: str, request: StartRequest, opened: Opened) -> None:
        name = request.name
        if not self._owners.start(shard, name):
            return
        if name in opened.found:  # an earlier provisioner started it, and its answer was lost
            opened.platform.adopt(name, opened.found[name])
            self._owners.note(Accepted(name, opened.found[name]))
            return
        try:
            opened.platform.start(name, request.launch_spec)
        except OptionError as error:
            self._owners.note(Refused(name, RejectedError(str(error))))

    def _on_events(self, call: IncomingCall) -> Later:
        self._watching.append((self._clock() + HOLD_S, call))
        self._answer_watching()
        return LATER

    def _answer_watching(self) -> None:
        now = self._clock()
        watching, self._watching = self._watching, []
        for until, call in watching:
            request: EventsRequest = call.body
            if not self._owners.hears(request.shard, request.incarnation, now):
                call.answer(Events(False))
                continue
            seen, outcomes = self._owners.news(request.shard, request.seen)
            if outcomes or now >= until:
                events = [RefusedStart.of(one) if isinstance(one, Refused) else one for one in outcomes]
                call.answer(Events(True, seen, events))
            else:
                self._watching.append((until, call))

    def _on_release(self, call: IncomingCall) -> None:
        sent: Release = call.body
        names = self._owners.release(sent.shard, sent.incarnation, self._clock() + sent.grace_s)
        if self._opened is not None:
            for name in names:
                self._opened.platform.suspect(name)

    # -- the platform ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to open the platform in a thread, without waiting. Call this in the server's thread."""
        self._opens = True
        run_apart(self._server.post, "dpflow-platform", self._open, self._on_outcome)

    def _on_outcome(self, outcome: Future[Opened]) -> None:
        error = outcome.exception()
        if error is None:
            self._on_opened(outcome.result())
            return
        if not isinstance(error, DPFlowError):
            SERVICE.error("platform %s could not be opened", self._spec.name, exc_info=error)
        self._opens = False
        self._refusal = str(error)
        attaching, self._attaching = self._attaching, []
        for call in attaching:
            call.fail(UsageError(self._refusal))  # whose text is shown unchanged

    def _open(self) -> Opened:
        spec, listen_at = self._spec, self._place.listen_at
        if listen_at:
            spec.check_listen(listen_at)
        platform = spec.open(outlived=True)
        try:
            launcher = spec.launcher()
            listen_at = listen_at or spec.listen_at()
        except BaseException:
            platform.close()
            raise
        return Opened(platform=platform, launcher=launcher, listen_at=listen_at, found=self._listed(launcher))

    def _on_opened(self, opened: Opened) -> None:
        self._opened = opened
        self._on_open()
        most = opened.platform.limits.max_workers
        self._owners.limit(most)
        PeriodicCall(
            partial(self._await_outcomes, opened.platform.wakeup_fd),
            0.0,
            "dpflow-outcomes",
            what="waiting for outcomes of workers",
        ).start()
        self._attach_all()

    def _await_outcomes(self, wakeup_fd: int) -> None:
        poller = select.poll()
        poller.register(wakeup_fd, select.POLLIN)
        if poller.poll(1000 * HOLD_S):
            ask_in(self._server, self._take)

    def _take(self) -> None:
        assert self._opened is not None
        for outcome in self._opened.platform.take():
            self._owners.note(outcome)
            match outcome:
                case Accepted():
                    self._refusal = ""
                case Refused(_, error) if isinstance(error, DeniedError | RejectedError):
                    self._refusal = str(error)
        self._answer_watching()

    def _listed(self, launcher: Launcher) -> Mapping[str, Ref]:
        if not launcher.limits.can_list:
            return {}
        try:
            return launcher.list(self._prefix)
        except Exception as error:
            SERVICE.warning("workers on platform %s cannot be listed: %s", self._spec.name, error)
            return {}

    def _end_strays(self, outcome: Future[Mapping[str, Ref]]) -> None:
        """End workers of this cluster that no shard owns, as after the death of a shard and a provisioner."""
        assert self._opened is not None
        found = outcome.result()
        for name in self._owners.strays(found):
            SERVICE.warning("%s belongs to no shard and is ended", name)
            self._opened.platform.adopt(name, found[name])
            self._opened.platform.stop(name, "no shard owns it")


def run(service: ServiceSpec) -> None:
    """Run a provisioner: the main function of its process."""
    assert service.place.worker_platform is not None
    assert service.platform is not None
    server = RpcServer(service.listen(service.place.provisioner_address), options=ServerOptions(shared_bytes=0))

    def await_sigterm() -> None:
        # The server continues, as shards stop their workers meanwhile.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=_end, args=(provisioner,)).start())

    provisioner = Provisioner(
        server,
        service.platform,
        service.place.worker_platform,
        prefix_of(service.place.cluster),
        clock=SuspendAwareClock(),
        on_opened=await_sigterm,  # again: a library's own handler, such as Ray's, writes a stack and aborts after 3 s
    )
    await_sigterm()
    provisioner.open()
    serve(service, server, status=provisioner.status, poll=provisioner.poll)


def _end(provisioner: Provisioner) -> None:
    with suppress(Exception):
        provisioner.close()
    os._exit(0)  # the platform's library may have threads that an interpreter's end would wait for
