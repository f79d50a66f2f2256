"""What is held where, in every order of events; and placement by itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError, PoolFullError, UsageError
from torch_dpflow.pool.planning.allocator import Drop, Fill, KeeperInstruction, KeeperMachine
from torch_dpflow.pool.planning.placement import NOBODY, place

LEASE_S, IDLE_S = 3.0, 10.0
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class Servers:
    """Obey a keeper: what each holds of each set."""

    def __init__(self, keeper: KeeperMachine) -> None:
        self.keeper = keeper
        self.held: dict[tuple[str, bytes], set[int]] = {}
        #: How often each stripe was read from storage.
        self.filled: dict[tuple[bytes, int], int] = {}

    def obey(self, instructions: Iterable[KeeperInstruction]) -> None:
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
        self.keeper.validate()

    def lose(self, server: str) -> None:
        for key in [key for key in self.held if key[0] == server]:
            del self.held[key]

    def held_by(self, server: str) -> dict[bytes, list[int]]:
        return {identity: sorted(mine) for (name, identity), mine in self.held.items() if name == server}

    def check(self, alive: Iterable[str], sets: Iterable[bytes]) -> None:
        """Each stripe is where the table says, and nowhere else, but in servers that are away."""
        tables = {one: self.keeper.table(one) for one in sets if self.keeper.holds(one)}
        owned = {
            (server, identity, stripe)
            for identity, table in tables.items()
            for found in (table.owned(), table.copies)
            for server, stripes in found.items()
            for stripe in stripes
        }
        assert owned == {
            (name, identity, stripe)
            for (name, identity), mine in self.held.items()
            for stripe in mine
            if name in alive
        }


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["renew", "restart", "return", "leave", "wait", "preload", "read", "unload", "new head"]
        ),
        st.integers(0, 3),
        st.integers(1, 60),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(events=events)
def test_servers_hold_what_the_tables_say_in_any_order_of_events(
    events: list[tuple[str, int, int, bool]],
) -> None:
    keeper = KeeperMachine(lease_s=LEASE_S, idle_s=IDLE_S)
    servers, now = Servers(keeper), 0.0
    generations, alive, renewed = [1] * 4, [False] * 4, [0.0] * 4
    sizes = dict[bytes, list[int]]()
    for what, which, amount, flag in events:
        now += 0.5
        name, identity = f"server {which}", bytes([which]) * 16
        known = {one for one in sizes if keeper.holds(one)}
        if what in ("renew", "restart", "return"):
            if what != "renew" or not alive[which]:
                generations[which] += 1
                if what == "restart":
                    servers.lose(name)
                alive[which] = True
            renewed[which] = now
            held = servers.held_by(name)
            servers.obey(keeper.renew(name, generations[which], 40 + 20 * which, now, held))
        elif what == "leave":
            servers.lose(name)
            alive[which] = False
            servers.obey(keeper.leave(name, generations[which], now))
        elif what == "wait":
            now += amount / 10
            for number in range(4):
                alive[number] &= now - renewed[number] < LEASE_S
            servers.obey(keeper.expire(now))
        elif what == "preload":
            before = [keeper.table(one) for one in known], keeper.rooms()
            try:
                sizes.setdefault(identity, [amount] * (which + 2))
                instructions = keeper.preload(identity, sizes[identity], now, explicit=flag, whole=which > 1)
            except PoolFullError:
                assert ([keeper.table(one) for one in known], keeper.rooms()) == before
            else:
                servers.obey(instructions)
                if which > 1 and identity not in known:
                    assert NOBODY not in keeper.table(identity).owners
        elif what == "read":
            keeper.read_by(identity, name, amount % 3, now)
        elif what == "unload" and identity in known:
            servers.obey(keeper.unload(identity))
        elif what == "new head":
            servers.keeper = keeper = KeeperMachine(lease_s=LEASE_S, idle_s=IDLE_S)
            generations, alive = [0] * 4, [number < amount % 5 for number in range(4)]
            back, renewed = [f"server {number}" for number in range(4) if alive[number]], [now] * 4
            for number, name in enumerate(back):
                servers.obey(keeper.renew(name, 0, 40 + 20 * number, now))
            for known_set in sorted({held_set for _, held_set in servers.held}):
                held = {name: servers.held_by(name).get(known_set, []) for name in back}
                servers.obey(keeper.recover(known_set, sizes[known_set], held, now, explicit=flag))
        keeper.validate()
        servers.check([f"server {number}" for number in range(4) if alive[number]], sizes)


def placed(keeper: KeeperMachine, identity: bytes) -> int:
    return sum(owner != NOBODY for owner in keeper.table(identity).owners)


def started(*capacities: int) -> tuple[KeeperMachine, Servers]:
    keeper = KeeperMachine(lease_s=LEASE_S, idle_s=IDLE_S)
    servers = Servers(keeper)
    for number, capacity in enumerate(capacities):
        servers.obey(keeper.renew(f"server {number}", 1, capacity, 0.0))
    return keeper, servers


def test_each_stripe_is_read_once_and_those_of_a_lost_server_once_more() -> None:
    keeper, servers = started(100, 100, 100)
    servers.obey(keeper.preload(A, [10] * 12, 0.0, explicit=True, whole=True))
    assert set(servers.filled.values()) == {1}
    assert len(servers.filled) == 12
    before = keeper.table(A)
    lost = {stripe for stripe, owner in enumerate(before.owners) if before.servers[owner] == "server 0"}
    servers.lose("server 0")
    servers.obey(keeper.leave("server 0", 1, 1.0))
    assert {stripe for (_, stripe), times in servers.filled.items() if times == 2} == lost
    after = keeper.table(A)
    assert after.generation > before.generation
    kept = [stripe for stripe in range(12) if stripe not in lost]
    assert [after.servers[after.owners[stripe]] for stripe in kept] == [
        before.servers[before.owners[stripe]] for stripe in kept
    ]


def test_a_silent_server_is_lost_and_comes_back_empty() -> None:
    keeper, servers = started(100)
    servers.obey(keeper.preload(A, [10], 0.0, explicit=True, whole=True))
    assert keeper.expire(LEASE_S + 1) == []
    assert keeper.table(A).owners == [NOBODY]
    assert (keeper.lives("server 0", 1), keeper.servers()) == (False, {})
    assert keeper.renew("server 0", 1, 100, LEASE_S + 2) == []  # this generation was given up
    assert keeper.renew("server 0", 2, 100, LEASE_S + 2) == [Fill("server 0", A, [0])]


def test_a_server_that_comes_back_keeps_what_nobody_else_has_by_now() -> None:
    keeper, servers = started(100)
    servers.obey(keeper.preload(A, [10] * 4, 0.0, explicit=True, whole=True))
    servers.obey(keeper.preload(B, [30], 0.0, explicit=True, whole=True))
    assert keeper.leave("server 0", 1, 1.0) == []
    servers.obey(keeper.renew("another", 1, 40, 1.0))
    assert keeper.table(B).owners == [NOBODY]
    back = keeper.renew("server 0", 2, 100, 1.0, servers.held_by("server 0"))
    assert back == [Drop("server 0", A)]
    assert keeper.servers() == {"another": (40, 0), "server 0": (100, 70)}


def test_a_server_that_comes_back_keeps_copies_beside_what_is_still_its_own() -> None:
    keeper, servers = started(100)
    servers.obey(keeper.preload(A, [10] * 8, 0.0, explicit=True, whole=True))
    keeper.leave("server 0", 1, 1.0)
    servers.obey(keeper.renew("another", 1, 30, 1.0))
    mine = servers.held_by("server 0")
    servers.obey(keeper.renew("server 0", 2, 100, 1.0, mine))
    table = keeper.table(A)
    assert table.copies == {"server 0": table.owned()["another"]}
    assert len(table.owned()["server 0"]) == 5
    assert keeper.servers() == {"another": (30, 0), "server 0": (100, 20)}  # copies take room
    servers.lose("another")
    assert keeper.leave("another", 1, 2.0) == []  # so nothing is read again
    table = keeper.table(A)
    assert (table.owned(), table.copies) == ({"server 0": [*range(8)]}, {"server 0": []})
    assert keeper.unload(A) == [Drop("server 0", A)]
    assert keeper.servers() == {"server 0": (100, 100)}


def test_a_new_head_gives_nothing_away_before_servers_had_time_to_come_back() -> None:
    keeper = KeeperMachine(lease_s=LEASE_S, idle_s=IDLE_S)
    assert keeper.renew("head", 1, 100, 0.0) == []
    assert keeper.recover(A, [10] * 3, {"head": [1]}, 0.0, explicit=True) == []
    assert keeper.preload(A, [], 0.0, explicit=True, whole=True) == []
    assert keeper.renew("server 0", 1, 100, 1.0, {A: [2]}) == []
    assert keeper.table(A).owners == [NOBODY, 0, 1]
    keeper.renew("head", 1, 100, LEASE_S)
    keeper.renew("server 0", 1, 100, LEASE_S)
    assert [one.stripes for one in keeper.expire(LEASE_S) if isinstance(one, Fill)] == [[0]]


def test_idle_implicit_sets_make_room_the_longest_idle_first() -> None:
    keeper, servers = started(100)
    for identity, when in ((A, 0.0), (B, 1.0)):
        servers.obey(keeper.preload(identity, [40], when, explicit=False, whole=True))
    keeper.read_by(A, "server 0", 1, 0.0)
    keeper.read_by(A, "server 0", 0, 2.0)
    assert keeper.preload(C, [50], 3.0, explicit=False, whole=True) == [
        Drop("server 0", B),
        Fill("server 0", C, [0]),
    ]


def test_explicit_sets_and_sets_in_use_never_make_room() -> None:
    keeper, servers = started(100)
    servers.obey(keeper.preload(A, [40], 0.0, explicit=True, whole=True))
    servers.obey(keeper.preload(B, [40], 0.0, explicit=False, whole=True))
    keeper.read_by(B, "server 0", 1, 0.0)
    with pytest.raises(PoolFullError, match="takes 30 bytes, and the servers have room for 20"):
        keeper.preload(C, [30], 1.0, explicit=True, whole=True)
    keeper.renew("server 0", 1, 100, 1000.0)
    keeper.expire(1000.0)
    assert keeper.holds(A)
    assert keeper.holds(B)


def test_a_part_of_a_set_is_held_and_grows_with_the_room() -> None:
    keeper, servers = started(50)
    servers.obey(keeper.preload(A, [10] * 10, 0.0, explicit=True, whole=False))
    assert placed(keeper, A) == 5
    servers.obey(keeper.renew("another", 1, 100, 0.0))
    assert (placed(keeper, A), keeper.table(A).placed_bytes) == (10, 100)


def test_all_of_a_set_that_is_held_in_part_takes_the_room_of_idle_ones_or_is_refused() -> None:
    keeper, servers = started(100)
    servers.obey(keeper.preload(A, [60], 0.0, explicit=True, whole=True))
    servers.obey(keeper.preload(B, [10] * 8, 0.0, explicit=False, whole=False))
    with pytest.raises(PoolFullError, match="takes 40 bytes, and the servers have room for 0"):
        keeper.preload(B, [], 1.0, explicit=True, whole=True)
    assert (placed(keeper, A), placed(keeper, B)) == (1, 4)
    assert keeper.rooms() == [40]  # that of B, which is implicit still
    servers.obey(keeper.unload(A))
    assert placed(keeper, B) == 8
    keeper.read_by(B, "server 0", 1, 0.0)
    servers.obey(keeper.preload(C, [10] * 10, 2.0, explicit=False, whole=False))
    assert placed(keeper, C) == 2
    keeper.read_by(B, "server 0", 0, 3.0)
    assert keeper.preload(C, [], 3.0, explicit=True, whole=True)[0] == Drop("server 0", B)
    assert not keeper.holds(B)
    assert placed(keeper, C) == 10
    assert keeper.rooms() == [0]  # C is explicit now
    keeper.validate()


def test_an_implicit_set_goes_when_nobody_has_read_it_for_a_while() -> None:
    keeper, servers = started(1000)
    servers.obey(keeper.preload(A, [10], 0.0, explicit=False, whole=True))
    keeper.read_by(A, "server 0", 1, 0.0)
    beat = keeper.renew("server 0", 1, 1000, 20.0)
    assert beat == []
    assert keeper.expire(20.0) == []
    keeper.read_by(A, "server 0", 0, 20.0)
    keeper.renew("server 0", 1, 1000, 29.0)
    assert keeper.expire(29.9) == []
    assert keeper.expire(30.0) == [Drop("server 0", A)]
    with pytest.raises(UsageError, match="preload it"):
        keeper.table(A)


def test_preloading_what_is_there_reads_nothing_and_may_make_it_stay() -> None:
    keeper, servers = started(100)
    servers.obey(keeper.preload(A, [10], 0.0, explicit=False, whole=True))
    assert keeper.preload(A, [10], 0.0, explicit=True, whole=True) == []
    keeper.renew("server 0", 1, 100, 50.0)
    assert keeper.expire(50.0) == []


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
        if owner != NOBODY:
            left[owner] -= size
    assert all(one >= 0 for one in left)
    for size, owner in zip(sizes, owners.tolist()):
        assert owner != NOBODY or all(one < size for one in left)


def test_a_part_of_a_set_is_placed_as_the_whole_is() -> None:
    weights = {"a": 1 << 40, "b": 1 << 41}
    whole = place(A, [1] * 100, weights)
    part = np.arange(30, 60)
    assert place(A, [1] * 30, weights, stripes=part).tolist() == whole[30:60].tolist()
    with pytest.raises(OptionError, match="leave out"):
        place(A, [1], {"a": 0})


def test_what_a_set_shares_stays_as_long_as_it() -> None:
    keeper = KeeperMachine(lease_s=LEASE_S, idle_s=IDLE_S)
    servers = Servers(keeper)
    servers.obey(keeper.renew("server 0", 1, 100, 0.0))
    servers.obey(keeper.preload(A, [40, 20], 0.0, explicit=False, whole=True))
    assert (keeper.rooms(), keeper.rooms(A)) == ([100], [40])
    with pytest.raises(PoolFullError, match="takes 41 bytes, and the servers have room for 40"):
        keeper.preload(B, [0, 41], 0.0, explicit=False, whole=True, base=A)
    servers.obey(keeper.preload(B, [0, 40], 0.0, explicit=True, whole=True, base=A))
    assert keeper.rooms() == [0]
    for now in (IDLE_S, 2 * IDLE_S):
        servers.obey(keeper.renew("server 0", 1, 100, now))
        servers.obey(keeper.expire(now))
        assert keeper.holds(A) == keeper.holds(B) == (now == IDLE_S)
        if keeper.holds(B):
            servers.obey(keeper.unload(B))
            servers.obey(keeper.preload(C, [0], now, explicit=True, whole=True, base=A))
            servers.obey(keeper.unload(C))
