"""Flows: which definitions are refused, and how requests and time move a flow through its life."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.cluster.control.flow_registry import (
    LOWER_S,
    MAX_ANNOUNCED,
    STARTING_S,
    UNREAD_S,
    Flow,
    FlowRegistry,
    FlowState,
)
from torch_dpflow.cluster.messages.coordinator import FlowSpec, LifeStep, Part
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.ipc.messages.fields import UnknownFlowError


def spec(name: str = "imagenet/train", version: int = 1, **changes: Any) -> FlowSpec:
    fields: dict[str, Any] = {
        "size": 100,
        "content": "0" * 64,
        "fingerprint": {"dataset": "ImageFolder of 100 samples", "transform": "Resize(224)"},
        "idle_s": 60.0,
        **changes,
    }
    return FlowSpec(name=name, version=version, **fields)


def begin(flows: FlowRegistry, name: str, version: int, now: float) -> Flow:
    """Access a flow and start its services, as a coordinator with room for them does."""
    flow = flows.access(name, version, now)
    flows.start(flow)
    return flow


def specs(flows: FlowRegistry) -> list[FlowSpec]:
    """Return what is to be stored."""
    return [flow.spec for flow in flows.flows]


def test_a_life_from_registration_to_deletion() -> None:
    flows, flow = FlowRegistry(), spec()
    found = flows.register(flow, 0.0)
    assert specs(flows) == [flow]
    assert found.state is FlowState.CREATED
    assert flows.access(flow.name, 1, 0.5) is found
    assert flows.running == {}, "the cluster may have no room for it"
    begin(flows, flow.name, 1, 1.0)
    assert flows.running == {flow.instance: flow}
    assert flows.report(flow.instance, 0, 2.0)
    assert found.state is FlowState.READY
    flows.report(flow.instance, 2, 3.0)
    assert found.state is FlowState.ACCESSED
    begin(flows, flow.name, 1, 4.0)
    assert not found.starting
    flows.tick(1000.0)
    flows.report(flow.instance, 0, 1000.0)
    assert found.state is FlowState.READY
    flows.tick(1059.0)
    assert flows.running == {flow.instance: flow}
    flows.tick(1060.0)
    assert flows.running == {}
    assert found.state is FlowState.IDLE
    begin(flows, flow.name, 1, 2000.0)
    assert flows.running == {flow.instance: flow}
    flows.report(flow.instance, 0, 2001.0)
    flows.tick(3000.0)
    assert flows.running == {}
    flows.delete(flow.instance, 3001.0)
    assert found.state is FlowState.DELETED
    assert flows.flows == []
    assert [(state.value, since) for state, since in found.life] == [
        ("created", 0.0),
        ("ready", 2.0),
        ("accessed", 3.0),
        ("ready", 1000.0),
        ("idle", 1060.0),
        ("ready", 2001.0),
        ("idle", 3000.0),
        ("deleted", 3001.0),
    ]


def test_a_view_tells_how_long_ago_each_state_was_and_when_services_will_end() -> None:
    flows, flow = FlowRegistry(), spec()
    flows.register(flow, 10.0)
    found = begin(flows, flow.name, 1, 10.0)
    assert found.view(None, 10.0).idle_in_s is None
    flows.report(flow.instance, 0, 10.0)
    part = Part(1, 2, 1 << 30)
    view = found.view(part, 40.0)
    assert (view.state, view.part, view.idle_in_s) == ("ready", part, 30.0)
    assert view.life == [LifeStep("created", 30.0), LifeStep("ready", 30.0)]
    assert found.view(part, 400.0).idle_in_s == 0.0


def test_a_flow_can_be_scaled_and_keeps_it() -> None:
    flows = FlowRegistry()
    flows.register(spec(workers=2), 0.0)
    assert flows.scale("imagenet/train", 3, None) is flows.flows[0]
    assert specs(flows) == [spec(workers=3, shards=3)]
    flows.register(spec(workers=2), 1.0)
    assert specs(flows) == [spec(workers=3, shards=3)]
    for shards, workers, scaled in (
        (2, 8, spec(workers=8, shards=2)),
        (None, 9, spec(workers=9, shards=2)),
        ("auto", None, spec(workers=9)),
    ):
        flows.scale("imagenet/train", shards, workers)  # type: ignore[arg-type]
        assert specs(flows) == [scaled]
    flows.register(spec(shards=4, workers=4), 2.0)
    assert specs(flows) == [spec(workers=9)], "another number of shards is no other flow"


def test_the_flow_that_nobody_has_read_for_longest_makes_way() -> None:
    flows = FlowRegistry()
    for number, name in enumerate("abc"):
        flows.register(spec(name), 0.0)
        begin(flows, name, 1, float(number))
        flows.report(f"{name}:v1", int(name == "a"), float(number))
    for now, running in ((3.0, "abc"), (1.0 + UNREAD_S, "ac"), (1.0 + UNREAD_S, "ac"), (2.0 + UNREAD_S, "a")):
        before = len(flows.running)
        assert flows.stop_unread(now) == (len(running) < before)
        assert flows.running.keys() == {f"{name}:v1" for name in running}
    assert not flows.stop_unread(100.0)


@pytest.mark.parametrize(
    ("name", "shards", "workers", "message"),
    [
        ("other", 1, None, "'other' is not registered"),
        ("imagenet/train", 0, None, "shards=0 is out of range; give an int from 1 to 100"),
        ("imagenet/train", 101, None, "shards=101 is out of range; give an int from 1 to 100"),
        ("imagenet/train", 3, 2, "with 3 shards, workers=2 is out of range; give an int from 3 to 4096"),
    ],
)
def test_a_flow_is_not_scaled_to_what_is_not_possible(
    name: str, shards: int, workers: int | None, message: str
) -> None:
    flows = FlowRegistry()
    flows.register(spec(), 0.0)
    with pytest.raises(UsageError, match=message):
        flows.scale(name, shards, workers)
    assert flows.flows[0].spec == spec()


def test_services_are_not_idle_while_they_start_but_are_given_up_in_the_end() -> None:
    flows, flow = FlowRegistry(), spec(idle_s=3.0)
    flows.register(flow, 0.0)
    found = begin(flows, flow.name, 1, 0.0)
    flows.tick(STARTING_S - 1)
    assert found.starting
    flows.report(flow.instance, 0, STARTING_S - 1)
    flows.tick(STARTING_S + 1)
    assert found.runs
    flows.tick(STARTING_S + 2)
    assert not found.runs
    begin(flows, flow.name, 1, 1000.0)
    flows.tick(1000.0 + STARTING_S)
    assert not found.runs
    assert found.state is FlowState.IDLE


def test_another_content_of_the_same_description_can_stand_in_for_one_that_never_came() -> None:
    flows, other = FlowRegistry(), spec(content="1" * 64)
    flow = flows.register(spec(), 0.0)
    assert flows.register(other, 1.0) is flow
    assert specs(flows) == [spec()]
    assert flows.flows_of_content(other.content) == [flow]
    assert flows.flows_of_content(spec().content) == [flow], "either may come first"
    flows.accept_content(flow, other.content)
    assert specs(flows) == [other]
    assert flows.flows_of_content(spec().content) == [], "what comes later is not taken"


def test_the_first_ones_own_content_changes_nothing_when_it_comes() -> None:
    flows, other = FlowRegistry(), spec(content="1" * 64)
    flows.register(spec(), 0.0)
    flows.register(other, 1.0)
    (flow,) = flows.flows_of_content(spec().content)
    flows.accept_content(flow, spec().content)
    assert flow.spec == spec()


def test_announced_contents_are_bounded() -> None:
    flows = FlowRegistry()
    flows.register(spec(), 0.0)
    for number in range(MAX_ANNOUNCED + 1):
        flows.register(spec(content=f"{number + 1:064x}"), 1.0)
    assert flows.flows_of_content(f"{1:064x}") == []
    assert len(flows.flows_of_content(f"{MAX_ANNOUNCED + 1:064x}")) == 1


def test_the_same_version_with_another_fingerprint_is_refused_and_the_difference_named() -> None:
    flows = FlowRegistry()
    flows.register(spec(), 0.0)
    other = spec(fingerprint={"dataset": "ImageFolder of 100 samples", "transform": "Resize(256)"})
    with pytest.raises(UsageError, match=r"transform is Resize\(256\), registered is Resize\(224\)"):
        flows.register(other, 1.0)
    with pytest.raises(UsageError, match="policy is lru, registered is absent"):
        flows.register(spec(fingerprint={**spec().fingerprint, "policy": "lru"}), 1.0)


def test_versions_live_side_by_side_while_jobs_read_them() -> None:
    flows = FlowRegistry()
    flows.register(spec(), 0.0)
    begin(flows, "imagenet/train", 1, 0.0)
    flows.report("imagenet/train:v1", 1, 0.0)
    flows.register(spec(version=2), 1.0)
    assert not begin(flows, "imagenet/train", 1, 2.0).starting, "its jobs ask again when its router has died"
    begin(flows, "imagenet/train", 2, 2.0)
    both = {"imagenet/train:v1": spec(), "imagenet/train:v2": spec(version=2)}
    assert flows.running == both
    flows.report("imagenet/train:v2", 1, 3.0)
    flows.tick(100.0)
    flows.report("imagenet/train:v1", 0, 110.0)
    flows.tick(110.0)
    assert flows.running == both, "its router may have died"
    flows.report("imagenet/train:v1", 1, 111.0)
    flows.tick(1000.0)
    flows.report("imagenet/train:v1", 0, 1000.0)
    flows.tick(1000.0 + LOWER_S)
    assert specs(flows) == [spec(version=2)] == [*flows.running.values()]
    with pytest.raises(UnknownFlowError, match=r"version 1, is not registered; register it"):
        flows.access("imagenet/train", 1, 2000.0)
    flows.register(spec(), 2000.0)  # a job of the lower version has come back
    assert begin(flows, "imagenet/train", 1, 2000.0).runs
    assert [(flow.spec.version, flow.replaced) for flow in flows.flows] == [(2, False), (1, True)]


def test_a_flow_that_is_not_known_is_to_be_registered() -> None:
    flows = FlowRegistry()
    for version in (1, 2):
        with pytest.raises(UnknownFlowError, match=rf"version {version}, is not registered; register it"):
            flows.access("imagenet/train", version, 0.0)
        flows.register(spec(version=3), 0.0)


def test_a_lower_version_that_no_job_comes_to_read_is_forgotten() -> None:
    flows = FlowRegistry()
    flows.register(spec(), 0.0)
    flows.register(spec(version=2), 1.0)
    flows.tick(STARTING_S - 1)
    assert len(flows.flows) == 2, "what it loads may be under way"
    flows.tick(STARTING_S)
    assert [flow.spec.version for flow in flows.flows] == [2]


def test_a_version_is_scaled_and_deleted_by_its_number_and_else_the_highest() -> None:
    flows = FlowRegistry()
    for version in (1, 3, 2):
        flows.register(spec(version=version), 0.0)
    assert flows.scale("imagenet/train", 2, 2).spec.version == 3
    assert flows.scale("imagenet/train:v1", None, 5).spec == spec(workers=5)
    for version in (2, 3, 3):  # a repeated call deletes nothing more
        flows.delete(f"imagenet/train:v{version}", 1.0)
    with pytest.raises(UsageError, match="name the version to delete"):
        flows.delete("imagenet/train", 1.0)
    with pytest.raises(UsageError, match=r"registered are \['imagenet/train:v1'\]"):
        flows.scale("imagenet/train:v3", 2, 2)
    assert [(flow.spec.version, flow.replaced) for flow in flows.flows] == [(1, False)]
    validate(flows)


def test_a_flow_that_is_read_cannot_be_deleted() -> None:
    flows = FlowRegistry()
    flows.register(spec(), 0.0)
    flows.report("imagenet/train:v1", 3, 0.0)
    with pytest.raises(UsageError, match="is read by 3 jobs"):
        flows.delete("imagenet/train:v1", 1.0)


def test_services_of_a_flow_that_is_not_known_are_ended() -> None:
    flows = FlowRegistry()
    assert not flows.report("gone:v1", 1, 0.0)
    assert flows.running == {}


def test_a_registry_that_starts_anew_takes_up_what_runs() -> None:
    flows = FlowRegistry()
    flows.restore(spec(version=2), 0.0)
    flows.restore(spec(version=1), 0.0)
    flows.tick(0.0)
    assert flows.running == {}, "what runs has not been reported yet"
    for version in (1, 2):
        assert flows.report(f"imagenet/train:v{version}", None, 1.0)
        assert f"imagenet/train:v{version}" in flows.running, "its router may start"
        assert flows.report(f"imagenet/train:v{version}", 4, 1.0)
    assert [flow.state for flow in flows.flows] == [FlowState.ACCESSED] * 2
    flows.tick(1000.0)
    assert len(flows.running) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../etc"}, "a letter or digit first"),
        ({"name": "a b"}, "a letter or digit first"),
        ({"name": "x" * 101}, "a letter or digit first"),
        ({"version": 0}, "version=0 is out of range; give an int from 1 to"),
        ({"size": 0}, "size=0 is out of range; give an int from 1 to"),
        ({"shards": 0}, "shards=0 is out of range; give an int from 1 to 100"),
        ({"shards": 101}, "shards=101 is out of range; give an int from 1 to 100"),
        ({"workers": 0}, "workers=0 is out of range; give an int from 1 to"),
        ({"memory_bytes": 0}, "memory_bytes=0 is out of range; give an int from 1048576 to"),
        ({"idle_s": 1.0}, "idle_s=1.0 is out of range; give seconds from 3"),
        ({"cache_samples": 101}, "cache_samples=101 is out of range; give an int from 0 to 100"),
        ({"content": "../../x"}, "is no SHA-256"),
        ({"strategy": "none"}, "strategy='none' is unknown; choose one of"),
        ({"strategy": "dynagcs-letter"}, "strategy='dynagcs-letter' is unknown; choose one of"),
        ({"strategy": "joader", "size": 5_000_000}, "'joader' with 5,000,000 samples: at most 4,194,304 are allowed"),
        ({"strategy": "dynagcs", "size": 5_000_000}, 'use strategy="shared-log" or "independent"'),
        ({"policy": "shared-log"}, "policy='shared-log' is not one of"),
        ({"policy": "opt"}, "policy='opt' is not one of"),
        ({"task_timeout_s": 0.0}, "task_timeout_s=0.0 is out of range; give seconds above 0"),
    ],
)
def test_what_is_not_possible_is_refused_whole(changes: dict[str, Any], message: str) -> None:
    flows = FlowRegistry()
    with pytest.raises(OptionError, match=message):
        flows.register(spec(**changes), 0.0)
    assert flows.flows == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["register", "access", "report", "scale", "delete", "tick"]),
            st.sampled_from(["a", "b"]),
            st.integers(1, 3),
            st.integers(0, 2),
        ),
        max_size=40,
    )
)
def test_services_run_only_where_somebody_needs_them(steps: list[tuple[str, str, int, int]]) -> None:
    flows = FlowRegistry()
    now = 0.0
    for what, name, version, jobs in steps:
        now += 40.0
        instance = f"{name}:v{version}"
        try:
            if what == "register":
                flows.register(spec(name, version), now)
            elif what == "access":
                begin(flows, name, version, now)
            elif what == "report" and instance in flows.running:
                assert flows.report(instance, jobs - 1 if jobs else None, now)
            elif what == "scale":
                flows.scale(name, version, None)
            elif what == "delete":
                flows.delete(instance, now)
            else:
                flows.tick(now)
        except UsageError:
            pass
        validate(flows)
        idle = [one.spec.instance for one in flows.flows if one.state is FlowState.IDLE and not one.starting]
        assert not flows.running.keys() & {*idle}
        assert not any(flows.report(one, 1, now) for one in idle), "its services end"


def test_a_flow_between_two_epochs_gives_way_after_one_without_jobs() -> None:
    flows = FlowRegistry()

    def state() -> FlowState | None:
        train = flows.find("train")
        return train and train.state

    for name in ("train", "val", "old"):
        flows.register(spec(name=name), 0.0)
        begin(flows, name, 1, 0.0)
        flows.report(f"{name}:v1", int(name != "old"), 1.0)
    flows.report("train:v1", 1, 2.0, reading=0)
    assert flows.stop_unread(2.0 + UNREAD_S)
    assert flows.running.keys() == {"train:v1", "val:v1"}
    assert not flows.stop_unread(2.0 + UNREAD_S - 0.1)
    assert flows.stop_unread(2.0 + UNREAD_S)
    assert flows.running.keys() == {"val:v1"}
    assert not flows.stop_unread(1000.0), "val is read"
    flows.report("train:v1", 1, 8.0, reading=1)
    validate(flows)
    assert state() is FlowState.IDLE, "its router is about to end"
    assert begin(flows, "train", 1, 9.0).starting
    flows.report("train:v1", 1, 10.0, reading=1)
    assert state() is FlowState.ACCESSED
