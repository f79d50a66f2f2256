"""Jobs that read through a cache in every order of events: nothing is lost, nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.caches import make_policy
from torch_dpflow.cluster.cache.objects import Arrival, CacheInstruction, Cancel, Load, Serve
from torch_dpflow.cluster.cache.sample_cache import SampleCache

SAMPLES = 24


class Reader:
    """A job that reads its epochs in batches, wants ahead, and releases some time after it was served."""

    def __init__(self, name: str, epochs: list[list[int]], batch: int, ahead: int) -> None:
        self.name = name
        self.keys = [key for epoch in epochs for key in epoch]
        self.epoch_of = [number for number, epoch in enumerate(epochs) for _ in epoch]
        self.batch, self.ahead = batch, ahead
        self.wanted = 0
        self.position = 0
        self.waiting: set[int] = set()
        self.request: int | None = None
        self.got: dict[int, Any] = {}
        self.unreleased: list[int] = []

    @property
    def finished(self) -> bool:
        return self.position == len(self.keys) and not self.unreleased


class World:
    """Owns a cache and does what it says, one random step at a time."""

    def __init__(self, cache: SampleCache, readers: list[Reader], sizes: list[int], chance: random.Random) -> None:
        self.cache, self.readers, self.sizes, self.chance = cache, readers, sizes, chance
        self.loads: dict[int, Load] = {}
        self.requests: dict[int, Reader] = {}
        self.numbers = 0
        self.loaded: Counter[int] = Counter()
        self.worst_held = 0

    def obey(self, instructions: list[CacheInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Load(load):
                    assert load not in self.loads
                    self.loads[load] = instruction
                case Cancel(loads):
                    for load in loads:
                        del self.loads[load]
                case Serve(request, samples):
                    self.served(self.requests.pop(request), request, samples)
        validate(self.cache)
        figures = self.cache.statistics()
        assert figures.loading == len(self.loads)
        self.worst_held = max(self.worst_held, figures.held_bytes)

    def served(self, reader: Reader, request: int, samples: list[tuple[int, Any]]) -> None:
        if reader.request != request:
            return  # it has left since
        reader.request = None
        for ticket, value in samples:
            assert ticket in reader.waiting
            reader.waiting.discard(ticket)
            reader.got[ticket] = value
            reader.unreleased.append(ticket)

    def moves(self) -> list[Any]:
        """Everything that could happen next."""
        possible: list[Any] = [lambda load=load: self.land(load) for load in self.loads]
        for reader in self.readers:
            if reader.wanted < min(len(reader.keys), reader.position + reader.ahead):
                possible.append(lambda reader=reader: self.want(reader))
            if reader.unreleased:
                possible.append(lambda reader=reader: self.release(reader))
            if reader.request is None and (reader.waiting or reader.position < len(reader.keys)):
                possible.append(lambda reader=reader: self.fetch(reader))
        return possible

    def step(self) -> bool:
        possible = self.moves()
        if possible:
            self.chance.choice(possible)()
        return bool(possible)

    def land(self, load: int) -> None:
        told = self.loads.pop(load)
        self.loaded[told.key] += 1
        self.obey(self.cache.loaded([Arrival(load, (told.key, told.draw), self.sizes[told.key])]))

    def want(self, reader: Reader) -> None:
        first = reader.wanted
        epoch = reader.epoch_of[first]
        while reader.wanted < len(reader.keys) and reader.epoch_of[reader.wanted] == epoch:
            if reader.wanted >= reader.position + reader.ahead:
                break
            reader.wanted += 1
        wants = [(ticket, reader.keys[ticket]) for ticket in range(first, reader.wanted)]
        self.obey(self.cache.want(reader.name, wants, draw=hash((reader.name, epoch)) & (1 << 60) - 1))

    def fetch(self, reader: Reader) -> None:
        if not reader.waiting:
            last = min(len(reader.keys), reader.position + reader.batch)
            while reader.wanted < last:
                self.want(reader)
            reader.waiting = set(range(reader.position, last))
            reader.position = last
        self.numbers += 1
        reader.request = self.numbers
        self.requests[self.numbers] = reader
        self.obey(self.cache.fetch(reader.name, self.numbers, sorted(reader.waiting)))

    def release(self, reader: Reader) -> None:
        tickets, reader.unreleased = reader.unreleased, []
        self.obey(self.cache.release(reader.name, tickets))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    seed = draw(st.integers(0, 2**32))
    chance = random.Random(seed)
    sizes = [chance.choice([1, 10, 10, 10, 60]) for _ in range(SAMPLES)]
    repeatable = draw(st.booleans())
    policy = draw(st.sampled_from([None, "alsd", "lru", "refcnt", "minio"]))
    cache = SampleCache(
        capacity_bytes=draw(st.sampled_from([1, 30, 100, 400, 10_000])),
        concurrency=draw(st.integers(1, 5)),
        repeatable=repeatable,
        policy=None if policy is None else lambda budget: make_policy(policy, max_bytes=budget, keys=SAMPLES),
    )
    readers = []
    for number in range(draw(st.integers(1, 4))):
        epochs = [chance.sample(range(SAMPLES), SAMPLES) for _ in range(2)]
        batch = draw(st.integers(1, 8))
        readers.append(Reader(f"job-{number}", epochs, batch, batch * draw(st.integers(1, 4))))
        cache.join(f"job-{number}")
    return World(cache, readers, sizes, chance)


@settings(max_examples=80, deadline=None)
@given(worlds())
def test_every_job_gets_every_sample_of_its_plan_whatever_room_there_is(world: World) -> None:
    while world.step():
        pass
    for reader in world.readers:
        assert reader.finished, f"{reader.name} waits for {sorted(reader.waiting)} and nothing is under way"
        assert [reader.got[ticket][0] for ticket in range(len(reader.keys))] == reader.keys
        if not world.cache._kept._repeatable:
            assert max(Counter(reader.got.values()).values()) == 1, "what is drawn by chance is served once to a job"
    figures = world.cache.statistics()
    on_its_way = world.cache.concurrency * max(world.sizes)
    assert world.worst_held <= figures.capacity_bytes + on_its_way, "more is held than there is room for"


@settings(max_examples=50, deadline=None)
@given(worlds(), st.lists(st.sampled_from([1, 30, 100, 400, 10_000]), max_size=5))
def test_room_may_come_and_go_meanwhile(world: World, rooms: list[int]) -> None:
    for room in rooms:
        for _ in range(world.chance.randrange(60)):
            world.step()
        world.obey(world.cache.resize(room))
        validate(world.cache)
    while world.step():
        pass
    for reader in world.readers:
        assert [reader.got[ticket][0] for ticket in range(len(reader.keys))] == reader.keys


@settings(max_examples=50, deadline=None)
@given(worlds(), st.data())
def test_a_job_that_dies_leaves_nothing_and_holds_nobody_up(world: World, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 200))):
        world.step()
    dead = world.readers.pop(data.draw(st.integers(0, len(world.readers) - 1)))
    dead.request = None
    world.obey(world.cache.leave(dead.name))
    while world.step():
        pass
    assert all(reader.finished for reader in world.readers)
    for reader in world.readers:
        world.obey(world.cache.leave(reader.name))
    figures = world.cache.statistics()
    assert figures.jobs == figures.loading == figures.queued == figures.reserved_bytes == 0
    assert figures.ready == figures.cached


@settings(max_examples=50, deadline=None)
@given(worlds())
def test_a_frozen_job_does_not_stop_the_others(world: World) -> None:
    # It has asked far ahead and reads no more: what is kept for it makes room.
    frozen = world.readers.pop()
    world.obey(world.cache.want(frozen.name, enumerate(frozen.keys[:SAMPLES]), draw=1))
    while world.step():
        pass
    assert all(reader.finished for reader in world.readers)


@pytest.mark.parametrize("jobs", [2, 3, 4])
def test_jobs_that_read_the_same_keys_together_load_each_once(jobs: int) -> None:
    cache = SampleCache(capacity_bytes=10_000, concurrency=4, repeatable=False)
    order = random.Random(0).sample(range(SAMPLES), SAMPLES)
    readers = [Reader(f"job-{number}", [order], 4, 8) for number in range(jobs)]
    for reader in readers:
        cache.join(reader.name)
    world = World(cache, readers, [10] * SAMPLES, random.Random(1))
    for reader in readers:
        while reader.wanted < SAMPLES:
            reader.ahead = SAMPLES
            world.want(reader)
    while world.step():
        pass
    assert set(world.loaded.values()) == {1}
    assert all(reader.finished for reader in readers)
