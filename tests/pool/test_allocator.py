"""What is held where, in every order of events; and placement by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.errors import OptionError, PoolFullError, UsageError
from torch_dpflow.pool.planning.allocator import AllocatorInstruction, Drop, Fill, StripeAllocator
from torch_dpflow.pool.planning.layout import UNPLACED, place

LEASE_S, IDLE_S = 3.0, 10.0
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class Servers:
    """Obey a allocator: what each holds of each set."""

    def __init__(self, allocator: StripeAllocator) -> None:
        self.allocator = allocator
        self.held: dict[tuple[str, bytes], set[int]] = {}
        #: How often each stripe was read from storage.
        self.filled: dict[tuple[bytes, int], int] = {}

    def apply(self, instructions: Iterable[AllocatorInstruction]) -> None:
        for one in instructions:
            match one:
                case Fill(server, identity, stripes):
                    mine = self.held.setdefault((server, identity), set())
                    assert stripes
                    assert mine.isdisjoint(stripes)
                    mine |= set(stripes)
                    for stripe in stripes:
                        self.filled[identity, stripe] = self.filled.get((identity, stripe), 0) + 1
                case Drop(server, identity):
                    del self.held[server, identity]
        validate(self.allocator)

    def lose(self, server: str) -> None:
        for key in [key for key in self.held if key[0] == server]:
            del self.held[key]

    def held_by(self, server: str) -> dict[bytes, list[int]]:
        return {identity: sorted(mine) for (name, identity), mine in self.held.items() if name == server}

    def check(self, alive: Iterable[str], sets: Iterable[bytes]) -> None:
        """Each stripe is where the table says, and nowhere else, but in servers that are away."""
        tables = {one: self.allocator.dataset(one) for one in sets if self.allocator.holds(one)}
        owned = {
            (server, identity, stripe)
            for identity, table in tables.items()
            for server, stripes in table.held.items()
            for stripe in stripes
        }
        assert owned == {
            (name, identity, stripe) for (name, identity), mine in self.held.items() for stripe in mine if name in alive
        }


events = st.lists(
    st.tuples(
        st.sampled_from(["renew", "restart", "return", "leave", "wait", "preload", "read", "unload", "new leader"]),
        st.integers(0, 3),
        st.integers(1, 60),
        st.booleans(),
    ),
    max_size=40,
)


def facts(allocator: StripeAllocator, identity: bytes) -> dict[str, Any]:
    """What is known of a dataset, as it is now."""
    known = copy.deepcopy(vars(allocator.dataset(identity)))
    return {**known, "sizes": known["sizes"].tolist()}


@settings(max_examples=50, deadline=None)
@given(events=events)
def test_servers_hold_what_the_tables_say_in_any_order_of_events(
    events: list[tuple[str, int, int, bool]],
) -> None:
    allocator = StripeAllocator(lease_s=LEASE_S, idle_s=IDLE_S)
    servers, now = Servers(allocator), 0.0
    generations, alive, renewed = [1] * 4, [False] * 4, [0.0] * 4
    sizes = dict[bytes, list[int]]()
    for what, which, amount, flag in events:
        now += 0.5
        name, identity = f"server {which}", bytes([which]) * 16
        known = {one for one in sizes if allocator.holds(one)}
        if what in ("renew", "restart", "return"):
            if what != "renew" or not alive[which]:
                generations[which] += 1
                if what == "restart":
                    servers.lose(name)
                alive[which] = True
            renewed[which] = now
            held = servers.held_by(name)
            servers.apply(allocator.renew(name, generations[which], 40 + 20 * which, now, held))
        elif what == "leave":
            servers.lose(name)
            alive[which] = False
            servers.apply(allocator.leave(name, generations[which], now))
        elif what == "wait":
            now += amount / 10
            for number in range(4):
                alive[number] &= now - renewed[number] < LEASE_S
            servers.apply(allocator.expire(now))
        elif what == "preload":
            before = [facts(allocator, one) for one in known], allocator.rooms()
            try:
                sizes.setdefault(identity, [amount] * (which + 2))
                instructions = allocator.preload(identity, sizes[identity], now, explicit=flag, whole=which > 1)
            except PoolFullError:
                assert ([facts(allocator, one) for one in known], allocator.rooms()) == before
            else:
                servers.apply(instructions)
                if which > 1 and identity not in known:
                    assert None not in allocator.dataset(identity).owners
        elif what == "read":
            allocator.read_by(identity, name, amount % 3, now)
        elif what == "unload" and identity in known:
            servers.apply(allocator.unload(identity))
        elif what == "new leader":
            servers.allocator = allocator = StripeAllocator(lease_s=LEASE_S, idle_s=IDLE_S)
            generations, alive = [0] * 4, [number < amount % 5 for number in range(4)]
            back, renewed = [f"server {number}" for number in range(4) if alive[number]], [now] * 4
            for number, name in enumerate(back):
                servers.apply(allocator.renew(name, 0, 40 + 20 * number, now))
            for known_set in sorted({held_set for _, held_set in servers.held}):
                held = {name: servers.held_by(name).get(known_set, []) for name in back}
                servers.apply(allocator.recover(known_set, sizes[known_set], held, now, explicit=flag))
        validate(allocator)
        servers.check([f"server {number}" for number in range(4) if alive[number]], sizes)


def placed(allocator: StripeAllocator, identity: bytes) -> int:
    return sum(owner is not None for owner in allocator.dataset(identity).owners)


def started(*capacities: int) -> tuple[StripeAllocator, Servers]:
    allocator = StripeAllocator(lease_s=LEASE_S, idle_s=IDLE_S)
    servers = Servers(allocator)
    for number, capacity in enumerate(capacities):
        servers.apply(allocator.renew(f"server {number}", 1, capacity, 0.0))
    return allocator, servers


def test_each_stripe_is_read_once_and_those_of_a_lost_server_once_more() -> None:
    allocator, servers = started(100, 100, 100)
    servers.apply(allocator.preload(A, [10] * 12, 0.0, explicit=True, whole=True))
    assert set(servers.filled.values()) == {1}
    assert len(servers.filled) == 12
    before = copy.deepcopy(allocator.dataset(A))
    lost = {*before.owned_by("server 0")}
    servers.lose("server 0")
    servers.apply(allocator.leave("server 0", 1, 1.0))
    assert {stripe for (_, stripe), times in servers.filled.items() if times == 2} == lost
    after = allocator.dataset(A)
    kept = [stripe for stripe in range(12) if stripe not in lost]
    assert [after.owners[stripe] for stripe in kept] == [before.owners[stripe] for stripe in kept]


def test_a_silent_server_is_lost_and_comes_back_empty() -> None:
    allocator, servers = started(100)
    servers.apply(allocator.preload(A, [10], 0.0, explicit=True, whole=True))
    assert allocator.expire(LEASE_S + 1) == []
    assert allocator.dataset(A).owners == [None]
    assert (allocator.lives("server 0", 1), allocator.servers()) == (False, {})
    assert allocator.renew("server 0", 1, 100, LEASE_S + 2) == []  # this generation was given up
    assert allocator.renew("server 0", 2, 100, LEASE_S + 2) == [Fill("server 0", A, [0])]


def test_a_server_that_comes_back_keeps_what_nobody_else_has_by_now() -> None:
    allocator, servers = started(100)
    servers.apply(allocator.preload(A, [10] * 4, 0.0, explicit=True, whole=True))
    servers.apply(allocator.preload(B, [30], 0.0, explicit=True, whole=True))
    assert allocator.leave("server 0", 1, 1.0) == []
    servers.apply(allocator.renew("another", 1, 40, 1.0))
    assert allocator.dataset(B).owners == [None]
    back = allocator.renew("server 0", 2, 100, 1.0, servers.held_by("server 0"))
    assert back == [Drop("server 0", A)]
    assert allocator.servers() == {"another": (40, 0), "server 0": (100, 70)}


def test_a_server_that_comes_back_keeps_copies_beside_what_is_still_its_own() -> None:
    allocator, servers = started(100)
    servers.apply(allocator.preload(A, [10] * 8, 0.0, explicit=True, whole=True))
    allocator.leave("server 0", 1, 1.0)
    servers.apply(allocator.renew("another", 1, 30, 1.0))
    mine = servers.held_by("server 0")
    servers.apply(allocator.renew("server 0", 2, 100, 1.0, mine))
    allocated = allocator.dataset(A)
    assert allocated.held["server 0"] == {*range(8)}
    assert len(allocated.owned()["server 0"]) == 5
    assert allocator.servers() == {"another": (30, 0), "server 0": (100, 20)}  # copies take room
    servers.lose("another")
    assert allocator.leave("another", 1, 2.0) == []  # so nothing is read again
    allocated = allocator.dataset(A)
    assert (allocated.owned(), allocated.held) == ({"server 0": [*range(8)]}, {"server 0": {*range(8)}})
    assert allocator.unload(A) == [Drop("server 0", A)]
    assert allocator.servers() == {"server 0": (100, 100)}


def test_a_new_leader_gives_nothing_away_before_servers_had_time_to_come_back() -> None:
    allocator = StripeAllocator(lease_s=LEASE_S, idle_s=IDLE_S)
    assert allocator.renew("leader", 1, 100, 0.0) == []
    assert allocator.recover(A, [10] * 3, {"leader": [1]}, 0.0, explicit=True) == []
    assert allocator.preload(A, [], 0.0, explicit=True, whole=True) == []
    assert allocator.renew("server 0", 1, 100, 1.0, {A: [2]}) == []
    assert allocator.dataset(A).owners == [None, "leader", "server 0"]
    allocator.renew("leader", 1, 100, LEASE_S)
    allocator.renew("server 0", 1, 100, LEASE_S)
    assert [one.stripes for one in allocator.expire(LEASE_S) if isinstance(one, Fill)] == [[0]]


def test_idle_implicit_sets_make_room_the_longest_idle_first() -> None:
    allocator, servers = started(100)
    for identity, when in ((A, 0.0), (B, 1.0)):
        servers.apply(allocator.preload(identity, [40], when, explicit=False, whole=True))
    allocator.read_by(A, "server 0", 1, 0.0)
    allocator.read_by(A, "server 0", 0, 2.0)
    assert allocator.preload(C, [50], 3.0, explicit=False, whole=True) == [
        Drop("server 0", B),
        Fill("server 0", C, [0]),
    ]


def test_explicit_sets_and_sets_in_use_never_make_room() -> None:
    allocator, servers = started(100)
    servers.apply(allocator.preload(A, [40], 0.0, explicit=True, whole=True))
    servers.apply(allocator.preload(B, [40], 0.0, explicit=False, whole=True))
    allocator.read_by(B, "server 0", 1, 0.0)
    with pytest.raises(PoolFullError, match="takes 30 bytes, and the servers have room for 20"):
        allocator.preload(C, [30], 1.0, explicit=True, whole=True)
    allocator.renew("server 0", 1, 100, 1000.0)
    allocator.expire(1000.0)
    assert allocator.holds(A)
    assert allocator.holds(B)


def test_a_part_of_a_set_is_held_and_grows_with_the_room() -> None:
    allocator, servers = started(50)
    servers.apply(allocator.preload(A, [10] * 10, 0.0, explicit=True, whole=False))
    assert placed(allocator, A) == 5
    servers.apply(allocator.renew("another", 1, 100, 0.0))
    assert (placed(allocator, A), allocator.dataset(A).placed_bytes) == (10, 100)


def test_all_of_a_set_that_is_held_in_part_takes_the_room_of_idle_ones_or_is_refused() -> None:
    allocator, servers = started(100)
    servers.apply(allocator.preload(A, [60], 0.0, explicit=True, whole=True))
    servers.apply(allocator.preload(B, [10] * 8, 0.0, explicit=False, whole=False))
    with pytest.raises(PoolFullError, match="takes 40 bytes, and the servers have room for 0"):
        allocator.preload(B, [], 1.0, explicit=True, whole=True)
    assert (placed(allocator, A), placed(allocator, B)) == (1, 4)
    assert allocator.rooms() == [40]  # that of B, which is implicit still
    servers.apply(allocator.unload(A))
    assert placed(allocator, B) == 8
    allocator.read_by(B, "server 0", 1, 0.0)
    servers.apply(allocator.preload(C, [10] * 10, 2.0, explicit=False, whole=False))
    assert placed(allocator, C) == 2
    allocator.read_by(B, "server 0", 0, 3.0)
    assert allocator.preload(C, [], 3.0, explicit=True, whole=True)[0] == Drop("server 0", B)
    assert not allocator.holds(B)
    assert placed(allocator, C) == 10
    assert allocator.rooms() == [0]  # C is explicit now
    validate(allocator)


def test_an_implicit_set_goes_when_nobody_has_read_it_for_a_while() -> None:
    allocator, servers = started(1000)
    servers.apply(allocator.preload(A, [10], 0.0, explicit=False, whole=True))
    allocator.read_by(A, "server 0", 1, 0.0)
    heartbeat = allocator.renew("server 0", 1, 1000, 20.0)
    assert heartbeat == []
    assert allocator.expire(20.0) == []
    allocator.read_by(A, "server 0", 0, 20.0)
    allocator.renew("server 0", 1, 1000, 29.0)
    assert allocator.expire(29.9) == []
    assert allocator.expire(30.0) == [Drop("server 0", A)]
    with pytest.raises(UsageError, match="preload it"):
        allocator.dataset(A)


def test_preloading_what_is_there_reads_nothing_and_may_make_it_stay() -> None:
    allocator, servers = started(100)
    servers.apply(allocator.preload(A, [10], 0.0, explicit=False, whole=True))
    assert allocator.preload(A, [10], 0.0, explicit=True, whole=True) == []
    allocator.renew("server 0", 1, 100, 50.0)
    assert allocator.expire(50.0) == []


@given(servers=st.integers(2, 10), seed=st.binary(min_size=16, max_size=16))
def test_losing_a_server_moves_its_stripes_alone(servers: int, seed: bytes) -> None:
    weights = {f"server {number}": 1 << 40 for number in range(servers)}
    sizes = [1] * 500
    before = place(seed, sizes, weights)
    lost = f"server {servers - 1}"
    after = place(seed, sizes, {name: weight for name, weight in weights.items() if name != lost})
    names = sorted(weights)
    left = [name for name in names if name != lost]
    for one, other in zip(before.tolist(), after.tolist()):
        assert names[one] == lost or names[one] == left[other]


def test_loads_are_by_weight_and_one_of_eight_moves_an_eighth() -> None:
    sizes = np.full(20_000, 1)
    weights = {f"server {number}": (1 + number % 2) << 40 for number in range(8)}
    owners = place(A, sizes, weights)
    total = sum(weights.values())
    for number, name in enumerate(sorted(weights)):
        share = (owners == number).mean()
        assert share == pytest.approx(weights[name] / total, rel=0.1)
    more = place(A, sizes, weights | {"server 8": 1 << 40})
    assert (more != owners).mean() <= 1.1 * (1 << 40) / (total + (1 << 40))


@given(
    sizes=st.lists(st.integers(0, 30), max_size=30),
    room=st.lists(st.integers(0, 200), max_size=5),
    seed=st.binary(min_size=16, max_size=16),
)
def test_nobody_gets_more_than_it_has_room_for(sizes: list[int], room: list[int], seed: bytes) -> None:
    names = [f"server {number}" for number in range(len(room))]
    owners = place(seed, sizes, dict.fromkeys(names, 7), dict(zip(names, room)))
    left = list(room)
    for size, owner in zip(sizes, owners.tolist()):
        if owner != UNPLACED:
            left[owner] -= size
    assert all(one >= 0 for one in left)
    for size, owner in zip(sizes, owners.tolist()):
        assert owner != UNPLACED or all(one < size for one in left)


def test_a_part_of_a_set_is_placed_as_the_whole_is() -> None:
    weights = {"a": 1 << 40, "b": 1 << 41}
    whole = place(A, [1] * 100, weights)
    part = np.arange(30, 60)
    assert place(A, [1] * 30, weights, stripes=part).tolist() == whole[30:60].tolist()
    with pytest.raises(OptionError, match="leave out"):
        place(A, [1], {"a": 0})


def test_what_a_set_shares_stays_as_long_as_it() -> None:
    allocator = StripeAllocator(lease_s=LEASE_S, idle_s=IDLE_S)
    servers = Servers(allocator)
    servers.apply(allocator.renew("server 0", 1, 100, 0.0))
    servers.apply(allocator.preload(A, [40, 20], 0.0, explicit=False, whole=True))
    assert (allocator.rooms(), allocator.rooms(A)) == ([100], [40])
    with pytest.raises(PoolFullError, match="takes 41 bytes, and the servers have room for 40"):
        allocator.preload(B, [0, 41], 0.0, explicit=False, whole=True, base=A)
    servers.apply(allocator.preload(B, [0, 40], 0.0, explicit=True, whole=True, base=A))
    assert allocator.rooms() == [0]
    for now in (IDLE_S, 2 * IDLE_S):
        servers.apply(allocator.renew("server 0", 1, 100, now))
        servers.apply(allocator.expire(now))
        assert allocator.holds(A) == allocator.holds(B) == (now == IDLE_S)
        if allocator.holds(B):
            servers.apply(allocator.unload(B))
            servers.apply(allocator.preload(C, [0], now, explicit=True, whole=True, base=A))
            servers.apply(allocator.unload(C))
