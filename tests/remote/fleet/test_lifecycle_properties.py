"""A fleet under any sequence of events: what its machine promises about starts, places, ends and money."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_dpflow.errors import (
    DeniedError,
    ExpiredError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.fleet.lifecycle import DRAIN_S, LEASE_S, LEAVE_S, STOP_S, Fleet
from torch_dpflow.remote.fleet.worker_states import (
    RAISE_S,
    AdmitWorker,
    DrainWorker,
    Fail,
    FleetInstruction,
    RejectWorker,
    StartLimits,
    StartWorker,
    StopWorker,
    WorkerState,
)
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Refused, Warned
from torch_dpflow.workers.platform import End, Limits

LIFETIME_S, GRACE_S, MOST = 600.0, 5.0, 12
#: Errors that are waited out, or that lower the ceiling.
PASSING: list[PlatformError] = [
    QuotaError("full"),
    ThrottledError("slow down", 2.0),
    ExpiredError("expired"),
    UnavailableError("503"),
]
ANY = st.integers(0, 1 << 16)


def check_fleet(fleet: Fleet, now: float) -> None:
    """Check every invariant after a tick at `now`; O(workers), for tests. Raises AssertionError."""
    workers = fleet.workers
    places = Counter(one.number for one in workers if one.state.holds_place)
    assert len(places) <= fleet._target
    assert all(count <= 2 for count in places.values())
    busy = [one.number for one in workers if one.state in (WorkerState.WORKING, WorkerState.DRAINING)]
    assert len(busy) == len(set(busy)), "two workers work in one place"
    assert not [one for one in workers if one.state is WorkerState.ON_DECK and one.ready and one.number not in busy]
    for one in workers:
        assert one.name == f"{fleet._prefix}{one.number}-{one.incarnation}"
        assert one.incarnation <= fleet._incarnation
        leased = one.state in (WorkerState.ON_DECK, WorkerState.WORKING)
        assert one.arrived if leased else now < one.due < math.inf
        assert one.state is WorkerState.STOPPING or now < one.ends + fleet._grace_s
    check_limits(fleet._limits, now, [one.begun for one in workers])


def check_limits(limits: StartLimits, now: float, starts: list[float]) -> None:
    """Check every invariant, given when workers were started; for tests. Raises AssertionError."""
    latest = [begun for begun in starts if begun > now - limits._rate.period_s]
    assert len(latest) <= max(1, limits._limits.starts_per_s * limits._rate.period_s)
    assert limits.ceiling(now) <= limits._most


@dataclass
class Known:
    """What a model remembers of a worker for ever."""

    started: StartWorker
    at: float
    answered: bool = False
    arrived: bool = False
    fit: bool = False
    ready: bool = False
    admitted: bool = False
    stopped: bool = False
    gone: bool = False


class FleetMachine(RuleBasedStateMachine):
    """The platform and the shard answer as they like, or not at all."""

    @initialize(
        rate=st.sampled_from([0.05, 0.5, 3.0]),
        lifetime=st.sampled_from([None, LIFETIME_S]),
        workers=st.integers(0, 11),
        seed=st.integers(0, 99),
    )
    def begin(self, rate: float, lifetime: float | None, workers: int, seed: int) -> None:
        self.limits = Limits(
            max_lifetime_s=lifetime,
            grace_s=GRACE_S,
            max_workers=MOST,
            starts_per_s=rate,
            start_timeout_s=(10.0, 60.0),
        )
        self.rate, self.lifetime = rate, lifetime
        self.fleet = Fleet("dpf-", self.limits, draw=random.Random(seed).random)
        self.now, self.wanted = 0.0, 0
        self.known: dict[str, Known] = {}
        self.failed = False
        #: The ceiling that a refusal has shown, and when.
        self.shown: tuple[int, float] | None = None
        self.target(workers)
        self.come(0)

    # -- the world ----------------------------------------------------------------------------------------

    def step(self) -> list[FleetInstruction]:
        """Do what follows from the events."""
        instructions = self.fleet.tick(self.now)
        self.obey(instructions)
        assert all(self.now < worker.last_seen + LEASE_S for worker in self.fleet.connected)
        return instructions

    def obey(self, instructions: list[FleetInstruction]) -> None:
        check_fleet(self.fleet, self.now)
        alive = {worker.name for worker in self.fleet.workers}
        fresh = [one for one in instructions if isinstance(one, StartWorker)]
        for one in instructions:
            match one:
                case StartWorker(name):
                    assert name not in self.known, "each name is started once"
                    assert not self.failed
                    self.known[name] = Known(one, self.now)
                case AdmitWorker(name):
                    known = self.known[name]
                    assert known.fit
                    assert known.ready
                    assert not known.stopped, "who was stopped is never admitted"
                    assert not known.gone
                    assert not known.admitted
                    known.admitted = True
                case StopWorker(name):
                    assert not self.known[name].stopped
                    self.known[name].stopped = True
                    if worker := self.fleet.get(name):
                        worker.is_lost = True
                case DrainWorker(name):
                    assert self.known[name].fit
                case Fail():
                    assert not self.failed
                    self.failed = True
        for name, known in self.known.items():
            known.gone |= name not in alive
        if fresh:
            self.check_starts(len(alive))

    def check_starts(self, alive: int) -> None:
        spare = max(1, self.wanted // 10)
        assert alive <= min(self.wanted + spare, MOST)
        if self.shown is not None:
            ceiling, at = self.shown
            assert alive <= ceiling + (self.now - at) // RAISE_S, "one more a minute until one is accepted"
        period_s = max(10.0, 1.0 / self.rate)
        latest = [one for one in self.known.values() if one.at > self.now - period_s]
        assert len(latest) <= max(1, self.rate * period_s), "the bucket"
        held = [one.number for one in self.fleet.workers if one.state.holds_place]
        assert len(held) - len(set(held)) <= spare, "no more successors at a time"

    def tell(self, outcome: Outcome) -> None:
        self.fleet.handle(outcome, self.now)
        self.step()

    def find_room(self, known: Known) -> None:
        """A start has been accepted: if it was requested after a refusal, there is room again."""
        if self.shown is not None and known.at > self.shown[1]:
            self.shown = None

    def one(self, place: int, **having: Any) -> Known | None:
        """Some worker that is not gone and of which this is true."""
        found = [
            known
            for known in self.known.values()
            if not known.gone and all(getattr(known, name) is value for name, value in having.items())
        ]
        return found[place % len(found)] if found else None

    # -- events -------------------------------------------------------------------------------------------

    @rule(workers=st.integers(0, 10))
    def target(self, workers: int) -> None:
        self.wanted = workers
        self.fleet.target(workers)
        self.step()

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, 7.0, 31.0, 70.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule(place=ANY, lost=st.booleans())
    def accept(self, place: int, lost: bool) -> None:
        if known := self.one(place, answered=False):
            known.answered = True
            name = known.started.name
            if not lost:
                self.find_room(known)
            self.tell(Answerless(name, "timed out") if lost else Accepted(name, "ref"))

    @rule(place=ANY, error=st.sampled_from(PASSING))
    def refuse(self, place: int, error: PlatformError) -> None:
        if known := self.one(place, answered=False, arrived=False):
            known.answered = True
            if isinstance(error, QuotaError):
                self.shown = (max(1, len(self.fleet.workers) - 1), self.now)
            self.tell(Refused(known.started.name, error))
            assert known.gone

    @precondition(lambda self: not self.failed)
    @rule(place=ANY, dice=st.integers(0, 9))
    def reject(self, place: int, dice: int) -> None:
        if dice == 0 and (known := self.one(place, answered=False, arrived=False)):
            known.answered = True
            self.tell(Refused(known.started.name, RejectedError("no image")))
            assert self.failed

    @rule(place=ANY, dice=st.integers(0, 9))
    def deny(self, place: int, dice: int) -> None:
        """Who works goes on."""
        if dice == 0 and (known := self.one(place, answered=False, arrived=False)):
            known.answered = True
            failed, has_some = self.failed, any(one.arrived and not one.gone for one in self.known.values())
            self.tell(Refused(known.started.name, DeniedError("no right")))
            assert self.failed is failed or not has_some

    @rule(place=ANY, unfit=st.sampled_from(["", "", "", "old image", "no module"]))
    def arrive(self, place: int, unfit: str) -> None:
        if known := self.one(place, arrived=False):
            leaving = self.state(known) in (WorkerState.LEAVING, WorkerState.STOPPING)
            if not leaving:
                known.arrived, known.fit = True, not unfit
                self.find_room(known)
            self.fleet.arrived(known.started.name, unfit, self.now)
            refused = any(isinstance(one, RejectWorker) for one in self.step())
            assert refused is (leaving or bool(unfit)), "who was given up is turned away"

    @rule(last=st.integers(0, 2))
    def come(self, last: int) -> None:
        """As it goes when nothing goes wrong, which steps by chance seldom achieve; for all but the last few."""
        coming = [one.name for one in self.fleet.workers if one.state.is_expected]
        for name in coming[: len(coming) - last]:
            known = self.known[name]
            known.answered = known.arrived = known.fit = known.ready = True
            self.find_room(known)
            self.fleet.handle(Accepted(name, "ref"), self.now)
            self.fleet.arrived(name, "", self.now)
            self.fleet.ready(name)
        self.step()

    @rule(place=ANY)
    def call_again(self, place: int) -> None:
        if known := self.one(place, arrived=True):
            before = self.state(known)
            self.fleet.arrived(known.started.name, "", self.now)
            told = self.step()
            turned_away = any(isinstance(one, RejectWorker) for one in told)
            assert turned_away is (before in (WorkerState.LEAVING, WorkerState.STOPPING))
            assert known.gone or not turned_away or not self.state(known).holds_place

    @rule(place=ANY)
    def arrive_after_the_end(self, place: int) -> None:
        gone = [known for known in self.known.values() if known.gone]
        if gone:
            name = gone[place % len(gone)].started.name
            self.fleet.arrived(name, "", self.now)
            assert any(isinstance(one, RejectWorker) and one.name == name for one in self.step())

    @rule(place=ANY)
    def get_ready(self, place: int) -> None:
        if known := self.one(place, fit=True, ready=False):
            known.ready = True
            self.fleet.ready(known.started.name)
            self.step()

    @rule(place=ANY, dice=st.integers(0, 4))
    def lack(self, place: int, dice: int) -> None:
        """It finds out late that it cannot be used."""
        if dice == 0 and (known := self.one(place, arrived=True)):
            on_deck = self.state(known) is WorkerState.ON_DECK
            known.fit = known.fit and not on_deck
            self.fleet.unfit(known.started.name, "no module", self.now)
            assert any(isinstance(one, RejectWorker) for one in self.step())
            assert known.gone or not on_deck or self.state(known) is WorkerState.LEAVING

    @rule(place=ANY)
    def send(self, place: int) -> None:
        """A message of a worker arrives; from the first one on it has a lease."""
        if (known := self.one(place, arrived=True)) and (worker := self.fleet.get(known.started.name)):
            worker.nonce, worker.last_seen = b"nonce", self.now

    @rule(place=ANY)
    def condemn(self, place: int) -> None:
        if (known := self.one(place, arrived=True)) and (worker := self.fleet.get(known.started.name)):
            worker.nonce, worker.last_seen = b"nonce", self.now
            worker.condemn("its result is malformed")
            assert any(isinstance(one, StopWorker) and one.name == worker.name for one in self.step())

    @rule(place=ANY)
    def leave(self, place: int) -> None:
        if known := self.one(place, arrived=True):
            self.fleet.goodbye(known.started.name, self.now)
            self.step()

    @rule(place=ANY)
    def end(self, place: int) -> None:
        if known := self.one(place):
            before = len(self.fleet.workers)
            self.fleet.handle(Ended(known.started.name, End(code=1)), self.now)
            assert len(self.fleet.workers) == before - 1, "who has died is not counted any more"
            self.step()

    @rule(place=ANY, until_s=st.sampled_from([1.0, 30.0, 120.0]))
    def warn(self, place: int, until_s: float) -> None:
        if known := self.one(place):
            self.tell(Warned(known.started.name, until_s))

    @rule(seed=ANY)
    def go_on(self, seed: int) -> None:
        """Many events by chance, as what only a long life brings about is seldom found one at a time."""
        chance = random.Random(seed)
        acts = [
            lambda: self.target(chance.randrange(11)),
            lambda: self.wait(chance.choice([0.1, 1.0, 7.0, 31.0])),
            lambda: self.come(chance.randrange(3)),
            lambda: self.refuse(chance.randrange(99), chance.choice(PASSING)),
            lambda: self.warn(chance.randrange(99), 120.0),
            lambda: self.end(chance.randrange(99)),
        ]
        for _ in range(20):
            chance.choice(acts)()
            self.places_are_no_more_than_wanted()
            self.nobody_outlives_a_lifetime_without_a_stop()

    def state(self, known: Known) -> WorkerState:
        return next(one.state for one in self.fleet.workers if one.name == known.started.name)

    # -- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def places_are_no_more_than_wanted(self) -> None:
        held = {one.number for one in self.fleet.workers if one.state.holds_place}
        assert len(held) <= self.wanted

    @invariant()
    def nobody_outlives_a_lifetime_without_a_stop(self) -> None:
        if self.lifetime is not None:
            for known in self.known.values():
                assert known.gone or known.stopped or self.now < known.at + self.lifetime + GRACE_S

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        # With no help from anybody.
        self.target(0)
        for _ in range(3):
            for seconds in (DRAIN_S, LEAVE_S, max(STOP_S, 2 * GRACE_S)):
                self.now += seconds
                self.step()
        assert self.fleet.workers == []


FleetMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestFleetMachine = FleetMachine.TestCase
