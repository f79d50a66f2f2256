"""Leases under any sequence of events, against a model that remembers everything."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from torch_dpflow.ipc.rpc.leases import (
    ExpireLeases,
    LeaseGranted,
    Leases,
    Leave,
    Lost,
    RenewLease,
    Stale,
)

PEERS = st.sampled_from("abc")
GENERATIONS = st.integers(0, 4)
LEASE = 5.0


class Members(RuleBasedStateMachine):
    """Each generation of each peer: unheard, then a member, then gone for good."""

    @initialize()
    def begin(self):
        self.leases = Leases(lease_s=LEASE, remember_s=1e9)
        self.now = 0.0
        self.members = {}
        self.gone = {}
        self.last_heard = {}

    def tell(self, event):
        changes = self.leases.handle(event)
        self.leases.validate()
        for change in changes:
            match change:
                case LeaseGranted(peer, generation):
                    assert peer not in self.members
                    assert generation > self.gone.get(peer, -1)
                    self.members[peer] = generation
                case Lost(peer, generation, _):
                    assert self.members.pop(peer) == generation
                    self.gone[peer] = generation
        return changes

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(peer=PEERS, generation=GENERATIONS)
    def hear(self, peer, generation):
        newest = max(self.members.get(peer, -1), self.gone.get(peer, -1))
        is_news = generation > newest or generation == self.members.get(peer)
        changes = self.tell(RenewLease(peer, generation, self.now))
        if is_news:
            self.last_heard[peer] = self.now
            assert self.members[peer] == generation
            assert not any(isinstance(change, Stale) for change in changes)
        else:
            assert changes == [Stale(peer, generation, newest)]

    @rule(peer=PEERS, generation=GENERATIONS)
    def leave(self, peer, generation):
        changes = self.tell(Leave(peer, generation, self.now))
        assert len(changes) <= 1
        assert self.members.get(peer, generation + 1) > generation
        if peer not in self.members:
            self.gone[peer] = max(self.gone.get(peer, -1), generation)

    @rule()
    def tick(self):
        silent = {peer for peer in self.members if self.last_heard[peer] + LEASE <= self.now}
        changes = self.tell(ExpireLeases(self.now))
        assert all(isinstance(change, Lost) and change.reason == "expired" for change in changes)
        assert {change.peer for change in changes} == silent

    @invariant()
    def the_books_agree(self):
        assert self.leases.members == self.members


Members.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMembers = Members.TestCase
