"""A job's side of its shards: requests ahead of need, fetches from all shards at once, releases."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_dpflow.cluster.client.router_link import RouterLink
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.cluster.messages.shard import Ask, Served, ServedSample
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import DPFlowError, PeerLostError
from torch_dpflow.ipc.messages.fields import MAX_SAMPLES
from torch_dpflow.ipc.rpc import PendingCall, RpcClient

#: How long a fetch may wait for its samples before it is repeated, seconds; less where the job's patience is.
FETCH_S = 30.0
#: How long a shard may take to answer a heartbeat before the job asks whether another owns its keys, seconds.
HEARTBEAT_TIMEOUT_S = 2.0
#: Most samples of one fetch: the answer fits into a message even where each sample has many frames.
FETCH_SAMPLES = 256
#: How long a shard may take to confirm that a job leaves it, seconds.
LEAVE_S = 1.0
#: Most shared memory lent to a shard on this host, bytes.
LENT_BYTES = 1 << 28


class EpochDraw(NamedTuple):
    """The epoch that is read, and the random draws in it."""

    epoch: int
    #: Decides, with a sample's key, its random draws; None: the output of the cacheable stage is read.
    draw: int | None


@dataclass(slots=True)
class Wanted:
    """One sample that a job needs: its ticket and key."""

    ticket: int
    key: int


@dataclass(slots=True)
class Fetch:
    """One call to one shard for samples that the job waits for."""

    address: str
    wanted: list[Wanted]
    pending: PendingCall


@dataclass(slots=True)
class FetchOutcome:
    """The outcome of a fetch."""

    #: The samples and the frames of each.
    samples: list[tuple[ServedSample, list[memoryview]]] = field(default_factory=list)
    nbytes: int = 0
    #: Why it failed.
    error: DPFlowError | None = None


class ShardLinks:
    """Connections to the shards of one flow. Calls belong to one thread, but for `send_heartbeat` and `close`.

    Args:
        router: names the cluster, and the shard that owns each key.
    """

    def __init__(self, router: RouterLink) -> None:
        self.router = router
        #: The job's tickets, each used once.
        self.tickets = itertools.count(1)
        self._cluster: Cluster = router.cluster
        #: The table in use; requests carry its generation. The router's may change at any time.
        self._routes = router.routes
        self._lock = threading.Lock()
        self._clients: dict[str, RpcClient] = {}
        #: Tickets whose samples have come and that are to be released, by shard.
        self._taken: defaultdict[str, list[int]] = defaultdict(list)
        #: By shard, how many samples it has given out and loaded since it was started.
        self.tallies: dict[str, tuple[int, int]] = {}
        #: Samples that will be needed and were not requested yet, by shard.
        self._unsent: defaultdict[str, list[Wanted]] = defaultdict(list)

    def want(self, wanted: Sequence[Wanted]) -> None:
        """Note samples that will be needed, soonest first. They are requested with the next fetch, or by `flush`."""
        # One message for several batches: each message wakes a shard, whose code is out of the processor's caches by
        # then, and interrupts a worker that decodes.
        for address, part in self._by_shard(wanted):
            self._unsent[address] += part

    def flush(self, of: EpochDraw) -> None:
        """Request what was noted, without waiting for answers: a fetch makes up for a request that is lost."""
        self._use_latest_routes()
        for address in [address for address, unsent in self._unsent.items() if unsent]:
            while ahead := self._next_unsent(address, MAX_SAMPLES):
                self._begin("want", address, ahead, of)

    def fetch(self, wanted: Sequence[Wanted], of: EpochDraw) -> list[Fetch]:
        """Begin to fetch these from all their shards at once."""
        fetches: list[Fetch] = []
        self._drop_unsent(wanted)
        for address, part in self._by_shard(wanted):
            for start in range(0, len(part), FETCH_SAMPLES):
                some = part[start : start + FETCH_SAMPLES]
                ahead = self._next_unsent(address, MAX_SAMPLES - len(some))
                pending = self._begin("fetch", address, [*some, *ahead], of, ahead=len(ahead))
                fetches.append(Fetch(address, some, pending))
        return fetches

    def comes(self, fetch: Fetch, within_s: float) -> bool:
        """Wait for so long; whether `finish` would wait no more."""
        try:
            return fetch.pending.wait(within_s)
        except DPFlowError:  # `finish` tells of it
            return True

    def finish(self, fetch: Fetch) -> FetchOutcome:
        """Wait for the answer to a fetch. Samples that it lacks have to be fetched again."""
        outcome = FetchOutcome()
        try:
            answer = fetch.pending.result()
        except DPFlowError as error:
            outcome.error = error
            return outcome
        self.router.outages.on_answer()
        served: Served = answer.body
        self.tallies[fetch.address] = served.served, served.decodes
        frames, taken = answer.frames, self._taken[fetch.address]
        begin = 0
        for sample in served.samples:
            end = begin + sample.payload.frames
            outcome.samples.append((sample, frames[begin:end]))
            begin = end
            taken.append(sample.ticket)
        outcome.nbytes = sum(map(len, frames))
        return outcome

    def release(self, wanted: Sequence[Wanted], of: EpochDraw) -> None:
        """Release these samples at the shards, without waiting for the next fetch."""
        self._drop_unsent(wanted)
        for address, part in self._by_shard(wanted):
            self._taken[address] += [one.ticket for one in part]
        for address in [address for address, taken in self._taken.items() if taken]:
            while self._taken[address]:
                self._begin("want", address, [], of)

    def send_heartbeat(self, job: JobId) -> None:
        """Renew the job's lease at every shard. Any thread may call; raises the first error."""
        with self._lock:
            clients = list(self._clients.values())
        pending = [client.begin("heartbeat", job, timeout_s=HEARTBEAT_TIMEOUT_S) for client in clients]
        for call in pending:
            call.result()

    def interrupt(self) -> None:
        """Make the calls under way fail at once with PeerLostError. Any thread may call."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def forget(self, job: JobId) -> None:
        """Leave shards that own nothing any more and disconnect, so that they can end."""
        addresses = set(self.router.routes.addresses)
        with self._lock:
            gone = [self._clients.pop(address) for address in self._clients.keys() - addresses]
        _leave(gone, job)

    def close(self, job: JobId) -> None:
        """Leave every shard and disconnect. May be called twice."""
        if self.router.outages.is_out:
            self.interrupt()  # leaving would wait for an answer that does not come
            return
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        _leave(clients, job)

    def _use_latest_routes(self) -> None:
        """Go by the routing table in force; samples that were noted by the one before may have other owners."""
        routes = self.router.routes
        if routes is not self._routes:
            self._routes = routes
            unsent = [one for part in self._unsent.values() for one in part]
            self._unsent.clear()
            for address, part in self._split(sorted(unsent, key=lambda one: one.ticket)):
                self._unsent[address] = part

    def _by_shard(self, wanted: Sequence[Wanted]) -> list[tuple[str, list[Wanted]]]:
        self._use_latest_routes()
        return self._split(wanted)

    def _split(self, wanted: Sequence[Wanted]) -> list[tuple[str, list[Wanted]]]:
        routes = self._routes
        if len(routes.addresses) == 1:
            return [(routes.addresses[0], list(wanted))] if wanted else []
        parts: dict[str, list[Wanted]] = {}
        for one, place in zip(wanted, routes.places_of([one.key for one in wanted]).tolist()):
            parts.setdefault(routes.addresses[place], []).append(one)
        return list(parts.items())

    def _next_unsent(self, address: str, most: int) -> list[Wanted]:
        unsent = self._unsent[address]
        now, self._unsent[address] = unsent[:most], unsent[most:]
        return now

    def _drop_unsent(self, wanted: Sequence[Wanted]) -> None:
        tickets = {one.ticket for one in wanted}
        for address, unsent in self._unsent.items():
            self._unsent[address] = [one for one in unsent if one.ticket not in tickets]

    def _begin(
        self, method: str, address: str, wanted: list[Wanted], of: EpochDraw, *, ahead: int = 0
    ) -> PendingCall:
        taken = self._taken[address]
        now, self._taken[address] = taken[:MAX_SAMPLES], taken[MAX_SAMPLES:]
        ask = Ask(
            self.router.id,
            self._routes.generation,
            of.epoch,
            of.draw,
            [one.ticket for one in wanted],
            [one.key for one in wanted],
            now,
            ahead,
        )
        reply: Any = Served if method == "fetch" else None
        try:
            return self._begin_call(address, method, ask, reply)
        except DPFlowError:
            self._taken[address][:0] = now  # else the shard holds their memory for as long as the job lives
            raise

    def _begin_call(self, address: str, method: str, ask: Ask, reply: Any) -> PendingCall:
        timeout_s = min(FETCH_S, self.router.outages.reconnect_timeout_s)
        client = self._client(address)
        try:
            return client.begin(method, ask, reply_type=reply, timeout_s=timeout_s)
        except PeerLostError:  # another thread has disconnected it, or it takes no more
            with self._lock:
                if self._clients.get(address) is client:
                    del self._clients[address]
            client.close()
        return self._client(address).begin(method, ask, reply_type=reply, timeout_s=timeout_s)

    def _client(self, address: str) -> RpcClient:
        cluster = self.router.cluster
        if cluster is not self._cluster:
            self.interrupt()
            self._cluster = cluster
        with self._lock:
            client = self._clients.get(address)
            if client is None:
                client = self._clients[address] = cluster.connect(
                    address, timeout_s=FETCH_S, shared_bytes=LENT_BYTES
                )
            return client


def _leave(clients: Sequence[RpcClient], job: JobId) -> None:
    """Leave all these at once and disconnect."""
    pending: list[PendingCall] = []
    for client in clients:
        with suppress(DPFlowError):
            pending.append(client.begin("leave", job, timeout_s=LEAVE_S))
    for call in pending:
        with suppress(DPFlowError):  # the job's lease expires there in any case
            call.result()
    for client in clients:
        client.close()
