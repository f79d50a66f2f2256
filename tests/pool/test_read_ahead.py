"""Reading ahead in every order of events: what fits is requested, and each reader gets each sample once."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.cluster.cache.objects import Arrival, Cancel, Serve
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.pool.planning.read_ahead import KnownOrder, ReadAhead, ReadAheadInstruction, StorageRequest

SIZE = 100


class Storage:
    """Obeys a machine; what it was asked for comes when it is told."""

    def __init__(self, machine: ReadAhead, sizes: dict[int, int] | None = None) -> None:
        self.machine, self.sizes = machine, sizes or {}
        self.under_way: dict[int, int] = {}
        self.requests: list[StorageRequest] = []
        self.asked: Counter[int] = Counter()
        self.served: list[tuple[str, int, Any]] = []

    def apply(self, instructions: list[ReadAheadInstruction]) -> None:
        for one in instructions:
            match one:
                case StorageRequest(loads):
                    assert len(loads) >= 1
                    self.requests.append(one)
                    self.under_way |= {load.load: load.key for load in loads}
                    self.asked.update(load.key for load in loads)
                case Cancel(loads):
                    for load in loads:
                        del self.under_way[load]
                case Serve((reader, position, _), samples):
                    self.served.append((reader, position, samples[0][1] if samples else None))
        validate(self.machine)

    def take_served(self) -> list[tuple[str, int, Any]]:
        served, self.served = self.served, []
        return served

    def land(self, load: int) -> None:
        key = self.under_way.pop(load)
        self.apply(self.machine.arrived([Arrival(load, f"sample {key}", self.sizes.get(key, SIZE))]))

    def land_all(self) -> None:
        while self.under_way:
            self.land(next(iter(self.under_way)))


orders = st.integers(1, 60).flatmap(lambda count: st.permutations(range(count)))


@settings(max_examples=50, deadline=None)
@given(order=orders, k=st.integers(1, 9), room=st.integers(2, 53))
def test_what_fits_is_requested_whatever_the_order(order: list[int], k: int, room: int) -> None:
    machine = ReadAhead(capacity_bytes=room * SIZE, k=k, sample_bytes=SIZE)
    storage = Storage(machine)
    storage.apply(machine.announce("a", KnownOrder(order)))
    for position in range(len(order)):
        storage.land_all()
        storage.apply(machine.read("a", position))
        assert {*order[position : position + room]} <= storage.asked.keys()
        assert storage.served[-1] == ("a", position, f"sample {order[position]}")
        assert machine.used <= room * SIZE
        storage.apply(machine.consumed("a", [position]))
    assert set(storage.asked.values()) == {1}
    assert all(len(one.loads) <= k for one in storage.requests)
    assert machine.used == 0


class Reader:
    """Reads one position after the other, and keeps some for a while."""

    def __init__(self, order: list[int]) -> None:
        self.order = order
        self.position = 0
        self.is_waiting = False
        self.held: list[int] = []
        self.got: list[Any] = []


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    readers=st.integers(1, 3),
    room=st.integers(1, 12),
    k=st.integers(1, 5),
)
def test_every_reader_gets_every_sample_in_any_order_of_events(seed: int, readers: int, room: int, k: int) -> None:
    chance = random.Random(seed)
    machine = ReadAhead(capacity_bytes=room * SIZE, k=k, sample_bytes=SIZE)
    storage = Storage(machine, {key: chance.randint(0, 3 * SIZE) for key in range(12)})
    everybody = {f"reader {number}": Reader(chance.choices(range(12), k=12)) for number in range(readers)}
    for name, reader in everybody.items():
        storage.apply(machine.announce(name, KnownOrder(reader.order)))
    while any(reader.position < 12 or reader.held for reader in everybody.values()):
        name, reader = chance.choice(list(everybody.items()))
        move = chance.random()
        if storage.under_way and move < 0.4:
            storage.land(chance.choice(list(storage.under_way)))
        elif reader.held and move < 0.7:
            done = chance.sample(reader.held, chance.randint(1, len(reader.held)))
            reader.held = [one for one in reader.held if one not in done]
            storage.apply(machine.consumed(name, done))
        elif not reader.is_waiting and reader.position < 12:
            reader.is_waiting = True
            storage.apply(machine.read(name, reader.position))
        for who, position, value in storage.take_served():
            told = everybody[who]
            assert told.is_waiting
            assert position == told.position
            told.is_waiting = False
            if value is not None:
                told.got.append(value)
                told.held.append(position)
                told.position += 1
        # Nobody waits for what nobody brings, unless what is not consumed takes the room.
        waiting = any(one.is_waiting for one in everybody.values())
        assert storage.under_way or not waiting or any(one.held for one in everybody.values())
    for name, reader in everybody.items():
        assert reader.got == [f"sample {key}" for key in reader.order]
        storage.apply(machine.leave(name))
    assert machine.used == 0
    assert not storage.under_way


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    readers=st.integers(1, 3),
    room=st.integers(1, 80),
    k=st.integers(1, 5),
    stolen=st.integers(0, 6),
)
def test_an_order_that_grows_is_read_as_one_that_was_known(
    seed: int, readers: int, room: int, k: int, stolen: int
) -> None:
    """Each announces pieces of its part, and leaves out some that others read."""
    chance = random.Random(seed)
    machine = ReadAhead(capacity_bytes=room * SIZE, k=k, sample_bytes=SIZE)
    storage = Storage(machine)
    names = [f"reader {number}" for number in range(readers)]
    orders = {name: KnownOrder([]) for name in names}
    for name in names:
        storage.apply(machine.announce(name, orders[name]))
    key, read = 0, Counter[int]()
    for _ in range(40):
        name = chance.choice(names)
        piece = np.arange(key, key + chance.randint(0, 5), dtype=np.int32)
        key += len(piece)
        order = orders[name]
        storage.apply(machine.extend(name, piece))
        for one in piece.tolist()[: max(0, len(piece) - (chance.random() < 0.3) * stolen)]:
            (position,) = order.positions(one)
            storage.apply(machine.read(name, position))
            storage.land_all()
            for who, at, value in storage.take_served():
                assert (who, at, value) == (name, position, f"sample {one}")
                read[one] += 1
            storage.apply(machine.pass_over(name, position))
            storage.apply(machine.consumed(name, [position]))
        storage.land_all()
    assert set(read.values()) <= {1}
    # What is left out keeps its room until it is passed over, and what is waited for may take that of others.
    assert set(storage.asked.values()) <= {1} or (stolen and room < 20 * readers)
    for name in names:
        storage.apply(machine.leave(name))
    assert machine.used == 0


def test_what_was_read_of_an_order_that_grows_is_forgotten() -> None:
    machine = ReadAhead(capacity_bytes=8 * SIZE, k=4, sample_bytes=SIZE)
    storage = Storage(machine)
    order = KnownOrder([])
    storage.apply(machine.announce("a", order))
    for piece in np.split(np.arange(400, dtype=np.int32), 100):
        storage.apply(machine.extend("a", piece))
        for one in piece.tolist():
            assert order.positions(one) == [one]
            storage.apply(machine.read("a", one))
            storage.land_all()
            storage.apply(machine.consumed("a", [one]))
            storage.apply(machine.pass_over("a", one + 1))
        assert order.kept <= 4
        assert not machine.is_open("a", 0)
    assert set(storage.asked.values()) == {1}
    assert machine.used == 0


def test_readers_of_one_order_share_each_fetch() -> None:
    machine = ReadAhead(capacity_bytes=100 * SIZE, k=4, sample_bytes=SIZE)
    storage = Storage(machine)
    order = list(range(40))
    for name in ("a", "b"):
        storage.apply(machine.announce(name, KnownOrder(order)))
    for position in order:
        for name in ("a", "b"):
            storage.apply(machine.read(name, position))
            storage.land_all()
            storage.apply(machine.consumed(name, [position]))
    assert set(storage.asked.values()) == {1}


def test_a_failed_sample_reaches_its_reader_as_its_error() -> None:
    machine = ReadAhead(capacity_bytes=SIZE, k=1, sample_bytes=SIZE)
    storage = Storage(machine)
    storage.apply(machine.announce("a", KnownOrder([5])))
    storage.apply(machine.read("a", 0))
    error = OSError("gone")
    storage.apply(machine.arrived([Arrival(storage.requests[0].loads[0].load, error, 0, keep=False)]))
    assert storage.served == [("a", 0, error)]


def test_what_is_wrong_is_said() -> None:
    machine = ReadAhead(capacity_bytes=SIZE, k=1, sample_bytes=SIZE)
    with pytest.raises(UsageError, match="announced no order"):
        machine.read("a", 0)
    machine.announce("a", KnownOrder([1, 2]))
    with pytest.raises(UsageError, match="position 2 of an order of 2"):
        machine.read("a", 2)
    machine.read("a", 0)
    machine.consumed("a", [0])
    with pytest.raises(UsageError, match="consumed already"):
        machine.read("a", 0)
    with pytest.raises(OptionError, match="sample_bytes"):
        ReadAhead(capacity_bytes=1, k=1, sample_bytes=0)


def test_what_is_passed_over_makes_room() -> None:
    machine = ReadAhead(capacity_bytes=4 * SIZE, k=2, sample_bytes=SIZE)
    storage = Storage(machine)
    storage.apply(machine.announce("a", KnownOrder(range(10))))
    storage.land_all()
    assert set(storage.asked) == {0, 1, 2, 3}
    storage.apply(machine.read("a", 3))
    storage.apply(machine.pass_over("a", 3))
    storage.land_all()
    assert set(storage.asked) == set(range(7))
    assert [machine.is_open("a", one) for one in (2, 3, 9)] == [False, True, True]


def test_an_order_takes_little_memory() -> None:
    keys = np.random.default_rng(0).permutation(500_000).astype(np.int32)
    tracemalloc.start()
    machine = ReadAhead(capacity_bytes=100 * SIZE, k=4, sample_bytes=SIZE)
    order = KnownOrder(keys)
    machine.announce("a", order)
    taken = tracemalloc.get_traced_memory()[0] + keys.nbytes
    tracemalloc.stop()
    assert taken < 9 * len(keys)
    assert all(order.positions(int(keys[one])) == [one] for one in range(0, len(keys), 4999))
