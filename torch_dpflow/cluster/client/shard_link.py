"""Client connections of a job to its flow's shards: requests ahead of need, fetches from all shards, releases."""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_dpflow._core.clocks import HEARTBEAT_S
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.cluster.client.collate import Received, received_sample
from torch_dpflow.cluster.client.router_link import LEAVE_S, RouterLink
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.cluster.messages.shard import MAX_WANTS, Ask, Served
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import DPFlowError, PeerLostError
from torch_dpflow.ipc.messages.fields import MAX_SAMPLES
from torch_dpflow.ipc.messages.payload_groups import split_payloads
from torch_dpflow.ipc.rpc import PendingCall, RpcClient

#: A call to a shard fetches at least this number of samples if it can; they may belong to several batches.
FETCHED_TOGETHER = 32
#: A call fetches up to MAX_TOGETHER small samples, in at most TOGETHER_BYTES: a call costs job and shard as much as
#: 30 small samples.
MAX_TOGETHER, TOGETHER_BYTES = 128, 4 << 20
#: A call fetches no more batches than arrive within this time (seconds), because the first batch waits for the last.
TOGETHER_S = 0.1
#: Timeout of a fetch (seconds), unless `reconnect_timeout_s` is shorter. After it, the fetch is repeated.
FETCH_S = 30.0
#: Timeout of a heartbeat (seconds). After it, the job fetches the routing table: another shard may own the keys.
HEARTBEAT_TIMEOUT_S = 2 * HEARTBEAT_S
#: Maximum number of samples of one fetch: the answer fits into a message even if each sample has many frames.
FETCH_SAMPLES = 256
#: Maximum shared memory lent to a shard on this host (bytes).
LENT_BYTES = 1 << 28


class EpochDraw(NamedTuple):
    """Number of an epoch, and the seed of its random draws."""

    epoch: int
    #: Together with a sample's key, the seed of its random draws; None: read the output of the cacheable stage.
    draw: int | None


@dataclass(slots=True)
class Wanted:
    """Sample that a job needs, with the ticket under which the job requests it."""

    ticket: int
    key: int


@dataclass(slots=True)
class Fetch:
    """Running call to one shard, for samples that the job waits for."""

    address: str
    wanted: list[Wanted]
    pending: PendingCall


class ShardLinks:
    """Connections of a job to the shards of its flow.

    Any thread may call `send_heartbeat`, `interrupt`, `forget` and `close`; the other methods belong to one thread.

    Args:
        router: provides the cluster and the routing table.
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
        #: Tickets of received samples that should be released, by shard.
        self._taken: defaultdict[str, list[int]] = defaultdict(list)
        #: Numbers of the requests, of all shards together.
        self._numbers = itertools.count(1)
        #: How many samples each shard has served and loaded, as far as answers have reported.
        self.tallies: dict[str, tuple[int, int]] = {}
        #: The loading times of each shard's workers, as far as answers have reported.
        self.times: dict[str, StageTimes] = {}
        #: Samples that will be needed and have not been requested yet, by shard.
        self._unsent: defaultdict[str, list[Wanted]] = defaultdict(list)

    @property
    def shards(self) -> int:
        return len(self._routes.addresses)

    def want(self, wanted: Sequence[Wanted]) -> None:
        """Record samples that the job will need, soonest first. Later calls of `fetch` or `flush` request them."""
        # One message for several batches: each message wakes a shard, whose code has left the processor's caches by
        # then, and interrupts a worker that decodes.
        for address, part in self._by_shard(wanted):
            self._unsent[address] += part

    def flush(self, of: EpochDraw) -> None:
        """Request the samples that `want` recorded. Do not wait for answers: a later fetch repeats a lost request."""
        self._use_latest_routes()
        for address in [address for address, unsent in self._unsent.items() if unsent]:
            while ahead := self._next_unsent(address, MAX_SAMPLES):
                self._begin("want", address, ahead, of)

    def fetch(self, wanted: Sequence[Wanted], of: EpochDraw) -> list[Fetch]:
        """Begin to fetch samples, at most the first `MAX_SAMPLES`, from all their shards; return the running calls."""
        wanted = wanted[:MAX_SAMPLES]
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
        """Wait up to `within_s` seconds for the answer; return whether `finish` would return or raise at once."""
        try:
            return fetch.pending.wait(within_s)
        except DPFlowError:  # `finish` raises it
            return True

    def finish(self, fetch: Fetch) -> dict[int, Received]:
        """Wait for a fetch; return the received samples by ticket. The caller must fetch missing samples again.

        Raises the errors of the call.
        """
        answer = fetch.pending.result()
        served: Served = answer.body
        groups = split_payloads(served.samples, answer.frames)
        self.router.outages.on_answer()
        # If calls overlap, an earlier call may be answered later.
        seen = self.tallies.get(fetch.address, (0, 0))
        self.tallies[fetch.address] = max(seen[0], served.served), max(seen[1], served.decodes)
        if served.decodes >= seen[1]:
            self.times[fetch.address] = served.times
        taken, samples = self._taken[fetch.address], dict[int, Received]()
        for group, payloads in groups:
            kind, table = group.kind, group.payload
            samples.update(
                (ticket, received_sample(kind, table, frames)) for ticket, frames in zip(group.numbers, payloads)
            )
            taken += group.numbers
        return samples

    def release(self, wanted: Sequence[Wanted], of: EpochDraw) -> None:
        """Inform shards at once, not with the next fetch, that these samples and all received samples are released."""
        self._drop_unsent(wanted)
        for address, part in self._by_shard(wanted):
            self._taken[address] += [one.ticket for one in part]
        for address in [address for address, taken in self._taken.items() if taken]:
            while self._taken[address]:
                self._begin("want", address, [], of)

    def send_heartbeat(self, job: JobId) -> None:
        """Renew the job's lease at every connected shard; raise the first error, if any. Any thread may call."""
        with self._lock:
            clients = list(self._clients.values())
        pending = [client.begin("heartbeat", job, timeout_s=HEARTBEAT_TIMEOUT_S) for client in clients]
        for call in pending:
            call.result()

    def interrupt(self) -> None:
        """Close all connections: running calls fail at once with PeerLostError. Any thread may call."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def forget(self, job: JobId) -> None:
        """Leave shards that no longer own keys, and disconnect from them, so that they can end."""
        addresses = set(self.router.routes.addresses)
        with self._lock:
            gone = {address: self._clients[address] for address in self._clients.keys() - addresses}
        _leave([*gone.values()], job)  # `interrupt` ends it
        with self._lock:
            for address in gone:
                self._clients.pop(address, None)

    def close(self, job: JobId) -> None:
        """Disconnect from all shards, and leave them first if the flow's services answer. May be called twice."""
        if self.router.outages.is_out:
            self.interrupt()  # to leave would wait for answers in vain
            return
        with self._lock:
            clients = list(self._clients.values())
        _leave(clients, job)  # `interrupt` ends it
        self.interrupt()

    def _use_latest_routes(self) -> None:
        """Switch to the current routing table, and assign recorded samples to their owners in it."""
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

    def _begin(self, method: str, address: str, wanted: list[Wanted], of: EpochDraw, *, ahead: int = 0) -> PendingCall:
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
            next(self._numbers),
        )
        reply: Any = Served if method == "fetch" else None
        try:
            return self._begin_call(address, method, ask, reply)
        except DPFlowError:
            self._taken[address][:0] = now  # else the shard holds their memory until the job ends
            raise

    def _begin_call(self, address: str, method: str, ask: Ask, reply: Any) -> PendingCall:
        timeout_s = min(FETCH_S, self.router.outages.reconnect_timeout_s)
        client = self._client(address)
        try:
            return client.begin(method, ask, reply_type=reply, timeout_s=timeout_s)
        except PeerLostError:  # another thread has closed it, or its queue is full
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
                client = self._clients[address] = cluster.connect(address, timeout_s=FETCH_S, shared_bytes=LENT_BYTES)
            return client


def _leave(clients: Sequence[RpcClient], job: JobId) -> None:
    pending: list[PendingCall] = []
    for client in clients:
        with suppress(DPFlowError):
            pending.append(client.begin("leave", job, timeout_s=LEAVE_S))
    for call in pending:
        with suppress(DPFlowError):  # the job's lease expires there anyway
            call.result()
    for client in clients:
        client.close()


def batches_ahead(samples: int, *, at_most: int) -> int:
    """Return how many batches of `samples` samples a job can request ahead by the shards' limit: 1 to `at_most`."""
    return max(1, min(at_most, MAX_WANTS // max(1, samples)))


def batches_together(samples: float, nbytes: float, wait_s: float, *, at_most: int) -> int:
    """Return how many batches to fetch by one call to each shard: 1 to `at_most`, so that few calls are needed.

    samples: mean number of samples of a batch from one shard. nbytes: bytes of a sample. wait_s: the time that the
        reader usually waits for a batch (seconds).
    """
    most = max(FETCHED_TOGETHER, min(MAX_TOGETHER, int(TOGETHER_BYTES / max(1.0, nbytes))))
    together = min(at_most, math.ceil(most / max(1.0, samples)))
    return max(1, min(together, int(TOGETHER_S / max(wait_s, 1e-6))))
