"""A job's side of its shards: asking ahead, fetching from all of them at once, giving back what it has."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch_dpflow.errors import DPFlowError, PeerLostError
from torch_dpflow.remote.access.cluster_address import Cluster
from torch_dpflow.remote.job.router_link import RouterLink
from torch_dpflow.remote.rpc import PendingCall, RpcClient
from torch_dpflow.remote.wire.body import MAX_SAMPLES
from torch_dpflow.remote.wire.router import JobId
from torch_dpflow.remote.wire.shard import Ask, Served, ServedSample

#: How long a fetch may wait for its samples before it is asked again, seconds; less where the job's patience is.
FETCH_S = 30.0
#: How long a shard may take to answer a heartbeat before the job asks whether another owns its keys, seconds.
BEAT_TIMEOUT_S = 2.0
#: Most samples of one fetch: an answer of so many fits a message even where each has many frames.
FETCH_SAMPLES = 256
#: How long a shard may take to hear that a job leaves it, seconds.
LEAVE_S = 1.0
#: Most shared memory lent to a shard on this host, bytes.
LENT_BYTES = 1 << 28


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
    """What a fetch came to."""

    #: The samples and the frames of each.
    samples: list[tuple[ServedSample, list[memoryview]]] = field(default_factory=list)
    nbytes: int = 0
    #: Why there is nothing; None where there is something, or nothing yet.
    error: DPFlowError | None = None


class ShardLinks:
    """Connections to the shards of one flow. Calls belong to one thread, but for `beat` and `close`.

    Args:
        router: tells which shard owns what, and of which cluster.
    """

    def __init__(self, router: RouterLink) -> None:
        self._router = router
        self._cluster: Cluster = router.cluster
        #: By which shards are chosen, and which they are told. The router's may be another at any moment.
        self._routes = router.routes
        self._lock = threading.Lock()
        self._clients: dict[str, RpcClient] = {}
        #: Tickets whose samples have come, to be given back, by shard.
        self._taken: defaultdict[str, list[int]] = defaultdict(list)
        #: By shard, how many samples it has given out and loaded since it was started.
        self.tallies: dict[str, tuple[int, int]] = {}
        #: What will be needed and is not said yet, by shard.
        self._unsaid: defaultdict[str, list[Wanted]] = defaultdict(list)

    def want(self, wanted: Sequence[Wanted]) -> None:
        """Note what will be needed, soonest first. It is said with a fetch from the same shard, or by `say`."""
        for address, part in self._by_shard(wanted):
            self._unsaid[address] += part

    def say(self, *, epoch: int, draw: int | None) -> None:
        """Say what was noted. Nothing is waited for: what is lost is made up by the fetch."""
        self._go_by_routes()
        for address in [address for address, unsaid in self._unsaid.items() if unsaid]:
            while ahead := self._next_unsaid(address, MAX_SAMPLES):
                self._begin("want", address, ahead, epoch, draw)

    def fetch(self, wanted: Sequence[Wanted], *, epoch: int, draw: int | None) -> list[Fetch]:
        """Begin to fetch these from all their shards at once."""
        fetches: list[Fetch] = []
        self._forget_unsaid(wanted)
        for address, part in self._by_shard(wanted):
            for start in range(0, len(part), FETCH_SAMPLES):
                some = part[start : start + FETCH_SAMPLES]
                ahead = self._next_unsaid(address, MAX_SAMPLES - len(some))
                pending = self._begin("fetch", address, [*some, *ahead], epoch, draw, ahead=len(ahead))
                fetches.append(Fetch(address, some, pending))
        return fetches

    def finish(self, fetch: Fetch) -> FetchOutcome:
        """Wait for the answer to a fetch. It may lack samples, which are to be fetched again."""
        outcome = FetchOutcome()
        try:
            answer = fetch.pending.result()
        except DPFlowError as error:
            outcome.error = error
            return outcome
        self._router.contact.heard()
        served: Served = answer.body
        self.tallies[fetch.address] = served.served, served.decodes
        frames, taken = answer.frames, self._taken[fetch.address]
        begin = 0
        for sample in served.samples:
            end = begin + sample.parcel.frames
            outcome.samples.append((sample, frames[begin:end]))
            begin = end
            taken.append(sample.ticket)
        outcome.nbytes = sum(map(len, frames))
        return outcome

    def give_back(self, wanted: Sequence[Wanted], *, epoch: int, draw: int | None) -> None:
        """These are not needed any more, and what has come is taken: say so now."""
        self._forget_unsaid(wanted)
        for address, part in self._by_shard(wanted):
            self._taken[address] += [one.ticket for one in part]
        for address in [address for address, taken in self._taken.items() if taken]:
            while self._taken[address]:
                self._begin("want", address, [], epoch, draw)

    def beat(self, job: JobId) -> None:
        """Stay known to every shard. Any thread may call; raises what it meets with."""
        with self._lock:
            clients = list(self._clients.values())
        pending = [client.begin("beat", job, timeout_s=BEAT_TIMEOUT_S) for client in clients]
        for call in pending:
            call.result()

    def interrupt(self) -> None:
        """Make what is under way fail at once with PeerLostError. Any thread may call."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def forget(self, job: JobId) -> None:
        """Leave shards that own nothing any more and disconnect, so that nobody waits for them."""
        addresses = set(self._router.routes.addresses)
        with self._lock:
            gone = [self._clients.pop(address) for address in self._clients.keys() - addresses]
        _leave(gone, job)

    def close(self, job: JobId) -> None:
        """Leave every shard and disconnect. May be called twice."""
        if self._router.contact.is_lost:
            self.interrupt()  # nobody is there to hear it
            return
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        _leave(clients, job)

    def _go_by_routes(self) -> None:
        """Go by the routing table in force from now on; what was noted by another one is for other shards."""
        routes = self._router.routes
        if routes is not self._routes:
            self._routes = routes
            unsaid = [one for part in self._unsaid.values() for one in part]
            self._unsaid.clear()
            for address, part in self._dealt(sorted(unsaid, key=lambda one: one.ticket)):
                self._unsaid[address] = part

    def _by_shard(self, wanted: Sequence[Wanted]) -> list[tuple[str, list[Wanted]]]:
        self._go_by_routes()
        return self._dealt(wanted)

    def _dealt(self, wanted: Sequence[Wanted]) -> list[tuple[str, list[Wanted]]]:
        routes = self._routes
        if len(routes.addresses) == 1:
            return [(routes.addresses[0], list(wanted))] if wanted else []
        parts: dict[str, list[Wanted]] = {}
        for one, place in zip(wanted, routes.places_of([one.key for one in wanted]).tolist()):
            parts.setdefault(routes.addresses[place], []).append(one)
        return list(parts.items())

    def _next_unsaid(self, address: str, most: int) -> list[Wanted]:
        unsaid = self._unsaid[address]
        now, self._unsaid[address] = unsaid[:most], unsaid[most:]
        return now

    def _forget_unsaid(self, wanted: Sequence[Wanted]) -> None:
        tickets = {one.ticket for one in wanted}
        for address, unsaid in self._unsaid.items():
            self._unsaid[address] = [one for one in unsaid if one.ticket not in tickets]

    def _begin(
        self, method: str, address: str, wanted: list[Wanted], epoch: int, draw: int | None, *, ahead: int = 0
    ) -> PendingCall:
        taken = self._taken[address]
        now, self._taken[address] = taken[:MAX_SAMPLES], taken[MAX_SAMPLES:]
        ask = Ask(
            self._router.id,
            self._routes.generation,
            epoch,
            draw,
            [one.ticket for one in wanted],
            [one.key for one in wanted],
            now,
            ahead,
        )
        reply: Any = Served if method == "fetch" else None
        try:
            return self._begin_call(address, method, ask, reply)
        except DPFlowError:
            self._taken[address][:0] = now  # else the shard keeps their room for as long as the job lives
            raise

    def _begin_call(self, address: str, method: str, ask: Ask, reply: Any) -> PendingCall:
        timeout_s = min(FETCH_S, self._router.contact.patience_s)
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
        cluster = self._router.cluster
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
        with suppress(DPFlowError):  # else its lease lapses
            call.result()
    for client in clients:
        client.close()
