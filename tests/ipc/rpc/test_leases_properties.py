"""Leases under any sequence of calls, against a model that remembers everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.invariants import validate
from torch_dpflow.ipc.rpc.leases import Leases, Renewal

PEERS = st.sampled_from("abc")
GENERATIONS = st.integers(0, 4)
LEASE = 5.0


class Members(RuleBasedStateMachine):
    """Each generation of each peer: unheard, then a member, then gone for good."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(lease_s=LEASE)
        self.now = 0.0
        self.members: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        self.renewed: dict[str, float] = {}

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(peer=PEERS, generation=GENERATIONS)
    def renew(self, peer: str, generation: int) -> None:
        member = self.members.get(peer)
        if generation == member:
            expected = Renewal.RENEWED
        elif generation <= max(-1 if member is None else member, self.gone.get(peer, -1)):
            expected = Renewal.STALE
        else:
            expected = Renewal.GRANTED if member is None else Renewal.REPLACED
        assert self.leases.renew(peer, generation, self.now) is expected
        if expected is not Renewal.STALE:
            self.members[peer], self.renewed[peer] = generation, self.now

    @rule(peer=PEERS, generation=GENERATIONS)
    def leave(self, peer: str, generation: int) -> None:
        ends = self.members.get(peer, generation + 1) <= generation
        assert self.leases.leave(peer, generation, self.now) is ends
        if ends:
            del self.members[peer]
        if peer not in self.members:
            self.gone[peer] = max(self.gone.get(peer, -1), generation)

    @rule()
    def expire(self) -> None:
        silent = {peer for peer in self.members if self.renewed[peer] + LEASE <= self.now}
        assert {*self.leases.expire(self.now)} == silent
        for peer in silent:
            self.gone[peer] = self.members.pop(peer)

    @invariant()
    def the_books_agree(self) -> None:
        assert self.leases.members == self.members
        validate(self.leases)


Members.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMembers = Members.TestCase
