"""Who has a name that several processes want."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.cluster.control.reader_names import LEAVING_S, ReaderNames
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import NameBusyError, StaleJobError

LEASE_S = 10.0


def make() -> ReaderNames:
    names = ReaderNames(lease_s=LEASE_S)
    assert names.admit("a", 1, holder=7, now=0.0) is False
    return names


def test_a_process_comes_back_under_its_name_and_what_was_known_is_void() -> None:
    names = make()
    assert names.admit("a", 1, holder=7, now=1.0) is False
    assert names.admit("a", 2, holder=7, now=1.0) is True
    with pytest.raises(StaleJobError, match="generation 2 is newer"):
        names.admit("a", 1, holder=7, now=2.0)
    with pytest.raises(StaleJobError, match="has no lease"):
        names.keep("a", 1, now=2.0)


def test_another_is_put_off_and_refused_once_the_holder_is_heard_of() -> None:
    names = make()
    with pytest.raises(NameBusyError, match=r"renewed its lease 3.0 s ago"):
        names.admit("a", 5, holder=8, now=3.0)
    names.keep("a", 1, now=3.0 + LEAVING_S)  # it may be about to leave
    with pytest.raises(NameBusyError):
        names.admit("a", 5, holder=8, now=3.0 + LEAVING_S)
    names.keep("a", 1, now=3.1 + LEAVING_S)
    with pytest.raises(UsageError, match="being read by another process"):
        names.admit("a", 5, holder=8, now=3.1 + LEAVING_S)
    assert names.members == {"a": 1}


def test_what_was_heard_before_another_asked_says_nothing() -> None:
    names = make()
    names.keep("a", 1, now=2.0)
    for now in (2.0, 3.0):
        with pytest.raises(NameBusyError):
            names.admit("a", 5, holder=8, now=now)


@pytest.mark.parametrize("end", ["lapses", "leaves"])
def test_the_name_of_one_that_is_gone_is_free(end: str) -> None:
    names = make()
    with pytest.raises(NameBusyError):
        names.admit("a", 5, holder=8, now=1.0)
    if end == "lapses":
        assert names.expire(LEASE_S) == ["a"]
    else:
        assert names.leave("a", 1, now=2.0)
    assert names.admit("a", 5, holder=8, now=LEASE_S) is False
    assert not names.leave("a", 1, now=LEASE_S)
    with pytest.raises(NameBusyError):
        names.admit("a", 9, holder=7, now=LEASE_S)


def test_a_holder_and_its_latest_renewal_are_known() -> None:
    names = make()
    assert names.leave("a", 1, now=1.0)
    assert names.admit("a", 2, holder=8, now=1.0, process="p") is False
    assert names.holder("a") == (8, "p")
    assert names.holder("b") == (0, "")
    assert names.renewed_at("a") == 1.0
    with pytest.raises(StaleJobError):
        names.keep("a", 1, now=2.0)
    names.keep("a", 2, now=2.0)
    assert names.renewed_at("a") == 2.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "heard", "leave", "tick"]),
            st.sampled_from("ab"),
            st.integers(1, 3),
            st.integers(0, 4),
        ),
        max_size=40,
    )
)
def test_a_name_never_has_two_holders(steps: list[tuple[str, str, int, int]]) -> None:
    names, now = ReaderNames(lease_s=3.0), 0.0
    #: By name, its holder and generation.
    held: dict[str, tuple[int, int]] = {}
    generation = 0
    for what, name, holder, pause in steps:
        now += pause
        for expired in names.expire(now):
            del held[expired]
        mine = held.get(name)
        if what == "admit":
            generation += 1
            try:
                replaced = names.admit(name, generation, holder, now)
            except UsageError:
                assert mine is not None
                assert mine[0] != holder
            else:
                assert replaced == (mine is not None)
                assert mine is None or mine[0] == holder
                held[name] = (holder, generation)
        elif what == "heard" and mine is not None:
            names.keep(name, mine[1], now)
        elif what == "leave" and mine is not None:
            assert names.leave(name, mine[1], now)
            del held[name]
        validate(names)
        assert names.members == {name: generation for name, (_, generation) in held.items()}


def test_hearing_of_one_reader_looks_at_no_other() -> None:
    names = ReaderNames(lease_s=LEASE_S)
    for reader in range(2048):
        names.admit(f"reader {reader}", 1, holder=reader, now=0.0)
    names.keep("reader 0", 1, now=1.0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        names.keep("reader 0", 1, now=1.0)
        assert tracemalloc.get_traced_memory()[1] - before < 4096
    finally:
        tracemalloc.stop()
