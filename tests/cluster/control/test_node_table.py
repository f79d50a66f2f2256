"""Nodes join, report, leave and are given up, in any order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.invariants import validate
from torch_dpflow.cluster.control.node_table import NodeTable
from torch_dpflow.cluster.messages.node import MAX_NODES, NodeRecord, ProcessView
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError

LEASE_S = 10.0
NAMES = st.sampled_from("abc")


def table(generations: int = 0) -> NodeTable:
    return NodeTable("cluster", generations=generations, lease_s=LEASE_S)


def view(id: str, role: str) -> ProcessView:
    return ProcessView(id, role, 1, 9, "", {})


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.now = table(), 0.0
        #: By name: of the node that has it, its generation, when it was heard, and whether it leaves.
        self.known: dict[str, tuple[int, float, bool]] = {}
        self.stored: dict[str, NodeRecord] = {}
        self.newest = 0

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name in self.known:
            with pytest.raises(OverloadedError, match="give another --name"):
                self.table.join(name, "other", "198.18.0.2", 4, self.now)
            return
        record = self.table.join(name, "this", "198.18.0.2", 4, self.now)
        assert record.generation > self.newest, "an earlier node's processes would be taken for its own"
        self.newest = record.generation
        self.known[name], self.stored[name] = (record.generation, self.now, False), record

    @rule(name=NAMES)
    def join_again(self, name: str) -> None:
        """The answer was lost, for which a node waits as long as for any other sign of life."""
        if name in self.known:
            assert self.table.join(name, "this", "198.18.0.2", 4, self.now) == self.stored[name]
            self.known[name] = self.known[name][0], self.now, self.known[name][2]

    @rule(prefix=st.sampled_from(["", "a"]), running=st.sets(NAMES))
    def its_platform_reports(self, prefix: str, running: set[str]) -> None:
        ended = {name for name in self.known if name.startswith(prefix)} - running
        assert {record.name for record in self.table.remove_ended(prefix, running)} == ended
        for name in ended:
            del self.known[name], self.stored[name]

    @rule(name=NAMES, age=st.integers(0, 2), standing=st.sampled_from(["here", "leaving"]))
    def report(self, name: str, age: int, standing: str) -> None:
        generation = self.known.get(name, (self.newest,))[0] - age
        is_known = name in self.known and not age
        assert self.table.report(name, generation, standing, [], self.now) == is_known
        if is_known:
            self.known[name] = generation, self.now, self.known[name][2] or standing == "leaving"

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        generation = self.known.pop(name, (0,))[0]
        removed = self.table.remove(name, generation)
        assert (removed is not None) == (generation > 0)
        self.stored.pop(name, None)

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = {name for name, (_, heard, _) in self.known.items() if self.now - heard >= LEASE_S}
        assert {record.name for record in self.table.tick(self.now)} == late
        for name in late:
            del self.known[name], self.stored[name]

    @rule()
    def restart(self) -> None:
        self.table = table()
        for record in self.stored.values():
            assert self.table.restore(record, self.now)
        self.known = {name: (generation, self.now, False) for name, (generation, _, _) in self.known.items()}
        # A coordinator's successor begins above all generations that this one has given.
        self.table = self.table if self.stored else table(self.newest)
        self.newest = max((record.generation for record in self.stored.values()), default=self.newest)

    @invariant()
    def agrees(self) -> None:
        validate(self.table)
        assert [*self.table.usable] == sorted(name for name, (_, _, leaves) in self.known.items() if not leaves)


TestHistories = Histories.TestCase


def test_only_shards_of_its_own_and_their_workers_are_a_nodes() -> None:
    """Else one could have jobs sent to a router of its own."""
    nodes = table()
    joined = nodes.join("a", "p", "x", 1, 0.0)
    own = [
        view("f:v1/shard-a-000", "shard"),
        view("f:v1/shard-a-000/worker-1", "worker"),
    ]
    foreign = [
        view("f:v1/router", "router"),
        view("coordinator", "coordinator"),
        view("f:v1/shard-000", "shard"),
        view("f:v1/shard-b-000/worker-0", "worker"),
    ]
    assert nodes.report("a", joined.generation, "here", [*own, *foreign], 0.0)
    assert [(one.id, one.node) for one in nodes.processes] == [(one.id, "a") for one in own]
    (seen,) = nodes.views(2.5)
    assert (seen.shards, seen.workers, seen.silent_s) == (1, 1, 2.5)


def test_nodes_of_another_cluster_are_not_awaited() -> None:
    assert not table().restore(NodeRecord("other", "a", "p", 7, "x", 1), 0.0)


def test_there_is_a_limit() -> None:
    nodes = table()
    for number in range(MAX_NODES):
        nodes.join(f"n{number}", "p", "x", 1, 0.0)
    with pytest.raises(UsageError, match="the most there may be"):
        nodes.join("one-more", "p", "x", 1, 0.0)
