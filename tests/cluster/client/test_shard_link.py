"""What a job says to its shards, and in how many messages, against real servers that note what they hear."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.shared_cluster import wait
from torch_dpflow.cluster.client import shard_link
from torch_dpflow.cluster.client.shard_link import EpochDraw, ShardLinks, Wanted
from torch_dpflow.cluster.control.routing import RouteMap
from torch_dpflow.cluster.messages.router import JobId, Route, RoutingTable
from torch_dpflow.cluster.messages.shard import Ask, Served
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcServer
from torch_dpflow.ipc.transport import TransportOptions, listen

Heard = list[tuple[str, list[int], list[int], list[int]]]
#: Keys that a shard owns.
SHARE = 100


class NotingShard:
    """A server that answers a shard's calls with nothing."""

    def __init__(self, address: str) -> None:
        #: Method, tickets that are waited for, tickets that are not, and tickets that are taken.
        self.heard: Heard = []
        #: Of each message, the routing generation, and the keys.
        self.routed: list[tuple[int, list[int]]] = []
        self._server = RpcServer(listen(address))
        self._server.register("want", self._note, body_type=Ask)
        self._server.register("fetch", self._note, body_type=Ask)
        self._server.register("leave", lambda call: None, body_type=JobId)
        self._thread = threading.Thread(target=self._server.serve)
        self._thread.start()

    def _note(self, call: IncomingCall) -> Result | None:
        ask: Ask = call.body
        awaited = [ticket for ticket, _ in ask.awaited] if call.method == "fetch" else []
        self.routed.append((ask.routing, ask.keys))
        self.heard.append((call.method, awaited, ask.tickets[len(awaited) :], ask.taken))
        return Result(Served([]), []) if call.method == "fetch" else None

    def close(self) -> None:
        self._server.stop()
        self._thread.join()
        self._server.close()


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[NotingShard]]:
    with (
        closing(NotingShard(f"ipc://{tmp_path}/0")) as first,
        closing(NotingShard(f"ipc://{tmp_path}/1")) as second,
    ):
        yield [first, second]


@pytest.fixture
def open_links(shards: list[NotingShard], tmp_path: Path) -> Iterator[Callable[[int], ShardLinks]]:
    opened: list[ShardLinks] = []

    def open_(count: int) -> ShardLinks:
        routes = [Route(SHARE * n, SHARE * (n + 1), f"shard-{n}", f"ipc://{tmp_path}/{n}") for n in range(count)]
        router: Any = SimpleNamespace(
            cluster=Cluster(address=f"ipc://{tmp_path}/0", transport=TransportOptions()),
            routes=RouteMap(RoutingTable(1, routes)),
            id=JobId("job", 1, "flow:v1"),
            outages=SimpleNamespace(reconnect_timeout_s=30.0, is_out=False, on_answer=lambda: None),
        )
        opened.append(ShardLinks(router))
        return opened[-1]

    yield open_
    for links in opened:
        links.close(JobId("job", 1, "flow:v1"))


def of(*numbers: int) -> list[Wanted]:
    """Samples whose tickets are their keys."""
    return [Wanted(number, number) for number in numbers]


SAID = EpochDraw(0, 0)


def finish(links: ShardLinks, fetches: list[Any]) -> None:
    for fetch in fetches:
        links.finish(fetch)


def test_what_will_be_needed_rides_with_the_fetch(
    shards: list[NotingShard], open_links: Callable[[int], ShardLinks]
) -> None:
    links = open_links(1)
    links.want(of(1, 2, 3, 4))
    fetches = links.fetch(of(1, 2), SAID)
    links.flush(SAID)
    finish(links, fetches)
    assert shards[0].heard == [("fetch", [1, 2], [3, 4], [])]


def test_of_a_large_batch_the_first_samples_are_fetched_and_the_others_requested(
    shards: list[NotingShard], open_links: Callable[[int], ShardLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_link, "MAX_SAMPLES", 4)
    monkeypatch.setattr(shard_link, "FETCH_SAMPLES", 2)
    links = open_links(1)
    links.want(of(*range(9)))
    fetches = links.fetch(of(*range(9)), SAID)
    links.flush(SAID)
    finish(links, fetches)
    wait(lambda: len(shards[0].heard) == 3, what="the last request, which nothing waits for")
    assert shards[0].heard == [("fetch", [0, 1], [4, 5], []), ("fetch", [2, 3], [6, 7], []), ("want", [], [8], [])]


def test_what_rides_with_no_fetch_is_said_by_itself(
    shards: list[NotingShard], open_links: Callable[[int], ShardLinks]
) -> None:
    links = open_links(2)
    links.want(of(1, SHARE + 1, 2, SHARE + 2))
    fetches = links.fetch(of(1), SAID)
    links.flush(SAID)
    fetches += links.fetch(of(SHARE + 1), SAID)
    finish(links, fetches)
    assert shards[0].heard == [("fetch", [1], [2], [])]
    assert shards[1].heard == [
        ("want", [], [SHARE + 1, SHARE + 2], []),
        ("fetch", [SHARE + 1], [], []),
    ]


def test_what_is_given_back_is_not_asked_for_any_more(
    shards: list[NotingShard], open_links: Callable[[int], ShardLinks]
) -> None:
    links = open_links(1)
    links.want(of(1, 2, 3))
    links.release(of(2, 3), SAID)
    finish(links, links.fetch(of(4), SAID))
    assert shards[0].heard == [("want", [], [], [2, 3]), ("fetch", [4], [1], [])]


class ChangingRouter(SimpleNamespace):
    """Has another table each time it is looked at: the shards change places."""

    @property
    def routes(self) -> RouteMap:
        self.generation += 1
        routes = [
            Route(SHARE * n, SHARE * (n + 1), f"shard-{n}", self.addresses[(n + self.generation) % 2]) for n in range(2)
        ]
        return RouteMap(RoutingTable(self.generation, routes))


def test_a_shard_is_chosen_by_the_table_that_it_is_told(shards: list[NotingShard], tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{n}" for n in range(2)]
    router: Any = ChangingRouter(
        generation=0,
        addresses=addresses,
        cluster=Cluster(address=addresses[0], transport=TransportOptions()),
        id=JobId("job", 1, "f:v1"),
        outages=SimpleNamespace(reconnect_timeout_s=30.0, is_out=False, on_answer=lambda: None),
    )
    links = ShardLinks(router)
    keys = [*range(3), *range(SHARE, SHARE + 3)]
    for start in (0, 1000, 2000):
        links.want([Wanted(start + key, key) for key in keys])
        finish(links, links.fetch([Wanted(start + key, key) for key in keys[::2]], SAID))
        links.flush(SAID)
    links.release([], SAID)
    links.close(router.id)
    asked = [(n, *routed) for n, shard in enumerate(shards) for routed in shard.routed]
    assert sum(len(keys) for *_, keys in asked) == 18
    for shard, generation, of_it in asked:
        assert {(key // SHARE + generation) % 2 for key in of_it} <= {shard}
