"""A provisioner's members under any sequence of events.

Whose they are, how many, what shards are told, who is ended.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.invariants import validate
from torch_dpflow.cluster.control.worker_owners import SILENT_S, WorkerOwners
from torch_dpflow.errors import ThrottledError, UnavailableError
from torch_dpflow.ipc.messages.fields import StaleShardError
from torch_dpflow.remote.launchers.contract import Accepted, Ended, Outcome
from torch_dpflow.workers.platform import End

PREFIX = "dpf-0c0ffee0-"
SHARDS = st.sampled_from(["f:v1/shard-000", "f:v1/shard-001", "g:v1/shard-000"])


class OwnersMachine(RuleBasedStateMachine):
    """Shards come, are replaced, fall silent and go; the provisioner may be replaced too."""

    @initialize(workers=st.integers(1, 12))
    def begin(self, workers: int) -> None:
        self.workers = workers
        self.now = 0.0
        self.names = 0
        #: What the platform has.
        self.there: set[str] = set()
        #: By shard: its incarnation, the members that it knows, with whether their start was answered, and its news.
        self.incarnations: dict[str, int] = defaultdict(int)
        self.known: dict[str, dict[str, bool]] = defaultdict(dict)
        self.seen: dict[str, int] = defaultdict(int)
        self.heard: dict[str, float] = {}
        self.replace_provisioner()

    @rule()
    def replace_provisioner(self) -> None:
        self.kept = WorkerOwners(PREFIX, self.workers)
        self.ended: set[str] = set()

    @rule(shard=SHARDS)
    def replace_shard(self, shard: str) -> None:
        self.incarnations[shard] += 1
        self.known[shard] = {}
        self.attach(shard)

    def attach(self, shard: str) -> None:
        answered = [name for name, is_answered in self.known[shard].items() if is_answered]
        self.seen[shard] = self.kept.attach(shard, self.incarnations[shard], answered, self.now)
        self.heard[shard] = self.now
        self.ended.difference_update(answered)  # which are its own again
        for name, is_answered in self.known[shard].items():
            if not is_answered:
                self.ask(shard, name)

    def is_heard(self, shard: str) -> bool:
        """As a shard calls, which attaches where the provisioner does not know it."""
        if not self.incarnations[shard]:
            return False
        self.heard[shard] = self.now
        if not self.kept.hears(shard, self.incarnations[shard], self.now):
            self.attach(shard)
        return True

    @rule(shard=SHARDS)
    def start(self, shard: str) -> None:
        if self.is_heard(shard):
            self.names += 1
            name = f"{PREFIX}0123456789-0-{self.names}"
            self.known[shard][name] = False
            self.ask(shard, name)

    def ask(self, shard: str, name: str) -> None:
        there = len(self.kept)
        if self.kept.start(shard, name):
            assert there < self.kept.most <= self.workers + max(1, self.workers // 10)
            self.there.add(name)
            self.ended.discard(name)  # by who had its end as news for a shard that was silent, and asks again
            self.kept.note(Accepted(name, "ref"))

    @rule(shard=SHARDS)
    def read(self, shard: str) -> None:
        if not self.is_heard(shard):
            return
        asked = self.seen[shard]
        self.seen[shard], outcomes = self.kept.news(shard, asked)
        assert self.kept.news(shard, asked) == (self.seen[shard], outcomes), "an answer that was lost comes again"
        for outcome in outcomes:
            self.hear(shard, outcome)

    def hear(self, shard: str, outcome: Outcome) -> None:
        known = self.known[shard]
        assert outcome.name in known, "no shard is told of another's members"
        if isinstance(outcome, Accepted):
            assert not known[outcome.name], "each start is answered once"
            known[outcome.name] = True
        else:
            assert isinstance(outcome, Ended) or isinstance(outcome.error, ThrottledError | UnavailableError)  # type: ignore[union-attr]
            del known[outcome.name]

    @rule(number=st.integers(0, 1 << 16))
    def end_one(self, number: int) -> None:
        if self.there:
            name = sorted(self.there)[number % len(self.there)]
            self.there.discard(name)
            self.kept.note(Ended(name, End()))

    @rule(shard=SHARDS)
    def release(self, shard: str) -> None:
        for name in self.kept.release(shard, self.incarnations[shard], self.now + 2.0):
            assert name in self.known[shard]
        self.incarnations[shard] += 1
        self.known[shard] = {}
        self.heard.pop(shard, None)

    @rule(shard=SHARDS)
    def call_as_one_that_was_replaced(self, shard: str) -> None:
        if self.heard.get(shard, -SILENT_S) + SILENT_S > self.now and self.kept.hears(
            shard, self.incarnations[shard], self.now
        ):
            try:
                self.kept.attach(shard, self.incarnations[shard] - 1, [], self.now)
            except StaleShardError:
                return
            raise AssertionError("it was let in")

    @rule(seconds=st.sampled_from([0.5, 3.0, SILENT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name in self.kept.to_end(self.now):
            assert name not in self.ended, "each is ended once"
            owners = [shard for shard, known in self.known.items() if name in known]
            assert all(self.now - self.heard[shard] >= SILENT_S for shard in owners), "its shard is there"
            self.ended.add(name)

    @rule()
    def sweep(self) -> None:
        for shard in self.incarnations:
            self.is_heard(shard)
        strays = set(self.kept.strays([*self.there, "dpf-ffffffff-0123456789-0-1"]))
        # One whose start an earlier provisioner did not answer may be refused by the next one, which is full.
        mine = {name for known in self.known.values() for name, is_answered in known.items() if is_answered}
        assert strays <= self.there - mine
        for name in strays:
            self.there.discard(name)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "kept"):
            validate(self.kept)

    def teardown(self) -> None:
        """Once all shards are gone nothing is left."""
        if not hasattr(self, "kept"):
            return
        self.sweep()
        for shard in self.incarnations:
            self.kept.release(shard, self.incarnations[shard], self.now)
        self.ended.update(self.kept.to_end(self.now + 2.0))
        assert self.there <= self.ended


TestWorkerOwners = OwnersMachine.TestCase
TestWorkerOwners.settings = settings(max_examples=40, stateful_step_count=40)
